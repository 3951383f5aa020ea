"""A run's model of a table as a fitted estimator of scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score
from torch import nn

from ldpfl.data.encoder import Encoder
from ldpfl.data.new_rows import predict_rows
from ldpfl.data.tables import cell_text
from ldpfl.errors import ConfigError, DataError, printable

if TYPE_CHECKING:
    import pandas

Rows = Any
"""A data frame with the columns of the run's table, an array of them in order, or records as dicts."""


class _Estimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Trained model with the encoding of its columns.

    Attributes:
        feature_names_in_: names of the columns.
    """

    def __init__(self, encoder: Encoder, module: nn.Module, threshold: float | None = None) -> None:
        self.encoder, self.module, self.threshold = encoder, module, threshold

    @property
    def feature_names_in_(self) -> NDArray[np.object_]:
        """Names of the columns. A model of texts has only the column of texts."""
        data = self.encoder.data
        return np.array([data.text] if data.text else data.columns, dtype=object)

    @property
    def n_features_in_(self) -> int:
        return len(self.feature_names_in_)

    def fit(self, rows: Rows, targets: object = None) -> Self:
        """Return the estimator unchanged. The run has trained it, and any further training would not be private."""
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_clone__(self) -> Self:
        """Return the estimator itself. An unfitted clone would be useless, because :meth:`fit` trains nothing."""
        return self

    def _answers(self, rows: Rows) -> pandas.DataFrame:
        """Return the result of :func:`ldpfl.predict`. For classes, its first column is the likeliest class."""
        return predict_rows(self.encoder, self.module, self._as_frame(rows), self.threshold)

    def _as_frame(self, rows: Rows) -> pandas.DataFrame:
        """Return ``rows`` as a data frame with the columns that the model takes. Raise a DataError if an array has more or fewer."""
        import pandas

        if hasattr(rows, "columns"):  # a data frame already
            return rows
        if isinstance(rows, Sequence) and rows and all(isinstance(row, Mapping) for row in rows):
            return pandas.DataFrame.from_records(rows)
        values = np.asarray(rows, dtype=object)
        if values.ndim != 2 or values.shape[1] != self.n_features_in_:
            expected = f"{self.n_features_in_} columns ({', '.join(self.feature_names_in_)})"
            raise DataError(
                f"rows have the shape {values.shape}, expected {expected}: give these columns as a data frame, records or an array"
            )
        # An array of numbers and texts has objects, whose columns get the types of their values again.
        return pandas.DataFrame(values, columns=list(self.feature_names_in_)).infer_objects()


class Classifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """Classifier of rows of a table.

    Attributes:
        classes_: the classes in the order of :meth:`predict_proba`; integers if all names are whole numbers.
        threshold: for two classes, the probability of the second class from which it is predicted, instead of 0.5.
    """

    @property
    def classes_(self) -> NDArray[Any]:
        names = self.encoder.classes
        return np.array([int(name) for name in names] if all(map(_is_whole, names)) else names)

    def predict_proba(self, rows: Rows) -> NDArray[np.float64]:
        """Return the probability of each class, for N rows and K classes (N, K)."""
        return np.asarray(self._answers(rows).iloc[:, 1:], dtype=np.float64)

    def predict(self, rows: Rows) -> NDArray[Any]:
        """Return the likeliest class (N,) of each row; of ordered classes, the median."""
        return np.asarray(self.classes_[self._predicted_places(rows)])

    def _predicted_places(self, rows: Rows) -> list[int]:
        """Return the place of each row's predicted class (N,) in ``classes_``."""
        # The data frame names a class as it is printed.
        places = {printable(name): place for place, name in enumerate(self.encoder.classes)}
        return [places[name] for name in self._answers(rows).iloc[:, 0]]

    def score(self, rows: Rows, targets: Any, sample_weight: Any = None) -> float:
        """Return the accuracy on N ``rows`` with the classes ``targets`` (N,), of any type whose text is the name of a class.

        So classes called 0 and 1 may be given as whole numbers, truth values, floats or words. Other labels count as wrong predictions.

        Raises:
            DataError: no label is a class of the model.
        """
        names = self.encoder.classes
        places = {name: place for place, name in enumerate(names)}
        labels = np.asarray(targets, dtype=object).reshape(-1)
        # A label is also read as a cell of a table is: 1.0 and True are 1.
        observed = [places.get(str(label), places.get(cell_text(label), -1)) for label in labels]
        if observed and max(observed) < 0:
            raise DataError(f"none of the targets is a class of the model ({', '.join(map(printable, names))}): give these names")
        return float(accuracy_score(observed, self._predicted_places(rows), sample_weight=sample_weight))


class MultiLabelClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """Classifier of several labels that a row may have."""

    @property
    def classes_(self) -> list[NDArray[np.int64]]:
        return [np.array([0, 1])] * self.encoder.outputs

    def predict_proba(self, rows: Rows) -> NDArray[np.float64]:
        """Return the probability of each label, for N rows and L labels (N, L)."""
        return np.asarray(self._answers(rows), dtype=np.float64)

    def predict(self, rows: Rows) -> NDArray[np.int64]:
        """Return 1 for each label (N, L) with a probability above one half, else 0."""
        return (self.predict_proba(rows) > 0.5).astype(np.int64)


class Regressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """Regression on rows of a table, in the unit of the target: of a number, or of a count."""

    def predict(self, rows: Rows) -> NDArray[np.float64]:
        """Return a number (N,) for each row."""
        return np.asarray(self._answers(rows).iloc[:, 0], dtype=np.float64)


_KINDS: Mapping[str, type[Classifier] | type[MultiLabelClassifier] | type[Regressor]] = {
    "class": Classifier,
    "ordered": Classifier,
    "classes": MultiLabelClassifier,
    "number": Regressor,
    "count": Regressor,
}


def estimator(encoder: Encoder | None, module: nn.Module, threshold: float | None) -> Classifier | MultiLabelClassifier | Regressor:
    """Return the estimator of a trained ``module``.

    Raises:
        ConfigError: the model does not predict rows of a table, scikit-learn has no kind of estimator for its target, or ``threshold`` is
            given although the model does not have two classes.
    """
    if encoder is None or encoder.targets not in _KINDS:
        kind = "on data other than a table" if encoder is None else f"for the target {encoder.targets!r}"
        raise ConfigError(f"the model was trained {kind}, for which scikit-learn has no estimator: use module() or predict() of the result")
    encoder.check_threshold(threshold)
    return _KINDS[encoder.targets](encoder, module.eval(), threshold)


def _is_whole(name: str) -> bool:
    """Whether ``name`` is a whole number, written without leading zeros."""
    digits = name.removeprefix("-")
    return digits.isdecimal() and str(int(name)) == name
