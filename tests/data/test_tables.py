"""Tables are read whole or refused in one line that names the place; what is read is what stands there."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st
from pyarrow import parquet

from grids import each
from ldpfl import DataError
from ldpfl.data.columns import column_words, read_features
from ldpfl.data.nodes import read_node_table
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import Table, read_table, table_from_frame
from ldpfl.data.targets import read_targets


def written(tmp_path: Path, text: str | bytes, name: str = "rows.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("cost;age\n1.234;75,1\n953;80,2\n", True),
        ("cost;age\n1.234;75\n953;80\n", True),
        ("cost;age\n1.234;75.1\n953;80.25\n", False),  # clear decimal points elsewhere
        ("cost;age\n1.234;75,1\n953.5;80,2\n", False),  # and in the column itself
        ("cost;age\n0.234;75,1\n0.953;80,2\n", False),
        ("cost,age\n1.234,75\n953,80\n", False),
        ("cost\tage\n1.234\t75,1\n953\t80,2\n", True),
        ("cost\tage\n1.234\t1,075\n953\t80\n", False),  # commas that may stand for thousands are no decimal commas
    ],
)
def test_points_that_may_stand_for_thousands_are_refused(text: str, refused: bool, tmp_path: Path) -> None:
    table = read_table(written(tmp_path, text))
    for use in (lambda: table.numbers("cost"), lambda: read_targets([table], DataConfig(target="cost"), "number")):
        with pytest.raises(DataError, match="'cost' holds numbers with a point before three digits") if refused else nullcontext():
            use()


@pytest.mark.parametrize("line", ["sep=;\r\n", '"sep=;"\n', "\ufeffsep=;\n", "SEP=; \n"])
def test_a_line_of_excel_that_states_the_delimiter_is_no_header(line: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(line + "age,year;name\n4,5;Ann\n6;Bob;7\n", encoding="utf-8", newline="")
    with pytest.raises(DataError, match="line 4: 3 cells, but the header has 2"):
        read_table(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text(line + "age,year;name\n4,5;Ann\n6;Bob\n", encoding="utf-8", newline="")
    columns = read_table(tmp_path / "t.csv").columns
    assert {name: list(column) for name, column in columns.items()} == {"age,year": ["4.5", "6"], "name": ["Ann", "Bob"]}


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_csv_file_is_read_whatever_separates_its_cells(delimiter: str, tmp_path: Path) -> None:
    lines = [["age", "name"], ["41", "Ann"], ["", "Bob, or " if delimiter == "," else "Bob"]]
    text = "\r\n".join(delimiter.join(f'"{cell}"' if "," in cell else cell for cell in line) for line in lines)
    table = read_table(written(tmp_path, "\ufeff" + text))
    assert list(table.columns) == ["age", "name"]
    np.testing.assert_array_equal(table.numbers("age"), [41.0, np.nan])
    assert table.columns["name"][0] == "Ann"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_the_header_alone_says_what_separates_cells(end: str, tmp_path: Path) -> None:
    table = read_table(written(tmp_path, end.join(["", "age,name", "41," + "x;" * 200, "42,Bob", ""])))
    assert list(table.columns) == ["age", "name"]
    np.testing.assert_array_equal(table.numbers("age"), [41.0, 42.0])


def test_a_cell_without_a_value_is_a_row_where_there_is_one_column(tmp_path: Path) -> None:
    for text in ("note\na\n\nb\n", 'note\na\n""\nb\n'):
        assert list(read_table(written(tmp_path, text)).columns["note"]) == ["a", "", "b"]


ODD = ("about 50", "50.5", "1.234,5", "yes", "", "1e400", "0x1f", "NA")


@given(cells=st.lists(st.floats(-1e6, 1e6).map(lambda value: f"{value:.3f}".replace(".", ",")), min_size=5, max_size=9), data=st.data())
def test_one_cell_decides_nothing_about_others_in_a_csv_file(cells: list[str], data: st.DataObject) -> None:
    """Else one record would decide what all others are."""
    place, odd = data.draw(st.integers(0, len(cells) - 1)), data.draw(st.sampled_from(ODD))
    with TemporaryDirectory() as folder:
        both = ("a;b\n" + "".join(f"{cell};x\n" for cell in own) for own in (cells, replaced(cells, place, odd)))
        read = [read_table(written(Path(folder), text)) for text in both]
    assert read[0].is_numeric("a")
    assert read[1].is_numeric("a")
    others = [np.delete(table.columns["a"], place).tolist() for table in read]
    assert others[0] == others[1]
    assert [float(cell) for cell in others[0]] == [float(cell.replace(",", ".")) for cell in cells[:place] + cells[place + 1 :]]


def replaced(cells: list[Any], place: int, new: Any) -> list[Any]:
    return [*cells[:place], new, *cells[place + 1 :]]


@given(
    cells=st.one_of(
        st.lists(st.booleans(), min_size=5, max_size=9),
        st.lists(st.floats(-1e6, 1e6), min_size=5, max_size=9),
        st.lists(st.integers(1 - 2**53, 2**53 - 1), min_size=5, max_size=9),  # a gap makes pandas round larger ones
    ),
    data=st.data(),
)
def test_one_cell_decides_nothing_about_others_in_a_frame(cells: list[Any], data: st.DataObject) -> None:
    """pandas chooses the type of a whole column by all that is in it."""
    place, odd = data.draw(st.integers(0, len(cells) - 1)), data.draw(st.sampled_from([None, "yes", True, 7, 2.5, float("nan")]))
    tables = [table_from_frame(pd.DataFrame({"a": own})) for own in (cells, replaced(cells, place, odd))]
    assert all(table.is_numeric("a") for table in tables)
    for table in tables:
        others = np.delete(table.columns["a"], place)
        assert others.size == len(cells) - 1
        assert [float(cell) for cell in others] == [float(cell) for cell in cells[:place] + cells[place + 1 :]]
    words = [np.delete(np.array(column_words(table, "a"), dtype=object), place).tolist() for table in tables]
    assert words[0] == words[1]


def test_a_row_is_named_by_the_line_it_ends_in(tmp_path: Path) -> None:
    """Line breaks within quotes and empty lines count."""
    path = written(tmp_path, 'note,age\n"two\nlines",4\n\nplain,five\n')
    table = read_table(path)
    assert [table.where(row) for row in range(2)] == [f"{path}, line 3", f"{path}, line 5"]
    with pytest.raises(DataError, match=r"line 5: the value in the column 'age' is not a number"):
        table.numbers("age")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("a,b\n", "has columns but no rows"),
        ("a,b\n1\n", "line 2: 1 cells, but the header has 2"),
        ("a,a\n1,2\n", "two columns are called 'a': rename one, or leave it out"),
        ("a,,c\n1,2,3\n", "column number 2 has no name"),
        ('a,b\n1,"2\n', "line 2"),
        (b"a,b\n1,\xff\n", "line 2: not UTF-8"),
        (b"a,b\n1,\0\n", "is not a CSV file"),
        (b"PAR1 and no more", "is empty|no row"),
    ],
)
def test_what_is_no_table_is_refused_in_one_line(text: str | bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said) as refusal:
        read_table(written(tmp_path, text))
    assert "\n" not in str(refusal.value)


@each("encoding", ("cp1252", "utf-16"))
def test_the_advised_line_makes_a_file_utf_8_and_keeps_codes_and_decimal_commas(encoding: str, tmp_path: Path) -> None:
    text = 'ward;crp;site\n0012;1,5;Süd\n0107;12,25;"St. ""M"""\n'
    path = written(tmp_path, text.encode(encoding), f"it's {encoding}.csv")
    with pytest.raises(DataError, match=f"In Python, if its encoding is {encoding}: from pathlib import Path; ") as refusal:
        read_table(path)
    run = subprocess.run([sys.executable, "-c", str(refusal.value).partition(f"is {encoding}: ")[2]], cwd=tmp_path, check=False)
    assert run.returncode == 0
    table = read_table(tmp_path / f"it's {encoding}-utf8.csv")
    assert {name: column.tolist() for name, column in table.columns.items()} == {
        "ward": ["0012", "0107"],
        "crp": ["1.5", "12.25"],
        "site": ["Süd", 'St. "M"'],
    }


def test_a_file_that_is_not_there_is_answered_with_the_nearest(tmp_path: Path) -> None:
    written(tmp_path, "a\n1\n", "patients.csv")
    with pytest.raises(DataError, match=r"did you mean 'patients.csv'"):
        read_table(tmp_path / "patient.csv")
    with pytest.raises(DataError, match=r"there is no file .*patents\.tsv: did you mean 'patients.csv'"):
        read_table(tmp_path / "patents.tsv")
    written(tmp_path, "a\n1\n", "notes.csv")
    with pytest.raises(DataError, match=r"there is no file .*nosuch\.csv: known: notes\.csv, patients\.csv$"):
        read_table(tmp_path / "nosuch.csv")
    with pytest.raises(DataError, match="is not a table that ldpfl can read"):
        read_table(written(tmp_path, "a\n1\n", "patients.txt"))
    for spreadsheet in (tmp_path / "not there.xlsx", written(tmp_path, "a\n1\n", "patients.ods")):
        with pytest.raises(DataError, match=r"is a spreadsheet, which ldpfl cannot read: save its sheet as CSV .*pandas\.read_excel"):
            read_table(spreadsheet)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="contains no table"):
        read_table(tmp_path / "empty")


def test_a_folder_is_one_table(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    written(folder, "a,b\n1,x\n2,y\n", "1.csv")
    parquet.write_table(pa.table({"a": [3.5], "b": ["z"]}), folder / "2.parquet")
    table = read_table(folder)
    np.testing.assert_array_equal(table.numbers("a"), [1.0, 2.0, 3.5])
    assert table.columns["b"].tolist() == ["x", "y", "z"]
    assert (table.where(1), table.where(2)) == (f"{folder / '1.csv'}, line 3", f"{folder / '2.parquet'}, row 1")
    written(folder, "a,c\n1,x\n", "3.csv")
    with pytest.raises(DataError, match=r"different columns \(b, c\): give all files the same"):
        read_table(folder)


def test_what_is_no_table_or_lacks_what_the_model_takes_is_named() -> None:
    with pytest.raises(
        DataError, match=r"^the rows must be a pandas data frame, or the path of a file or folder of tables, got a ndarray$"
    ):
        table_from_frame(np.zeros(3), "the rows")
    with pytest.raises(DataError, match=r"^there are no rows in the rows, only columns"):
        table_from_frame(pd.DataFrame({"age": []}), "the rows")
    with pytest.raises(DataError, match=r"^the table has no column 'age', which the model needs: did you mean 'aged'"):
        read_features(table_from_frame(pd.DataFrame({"aged": [1.0]})), DataConfig(columns=["age"]))
    with pytest.raises(DataError, match=r"^the table has no column 'crp', which the model needs: it needs age, crp$"):
        read_features(table_from_frame(pd.DataFrame({"age": [1.0], "id": [1.0]})), DataConfig(columns=["age", "crp"]))


def test_a_parquet_file_without_rows_or_content_is_refused(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "none.parquet")
    with pytest.raises(DataError, match=r"none.parquet has columns but no rows"):
        read_table(tmp_path / "none.parquet")
    with pytest.raises(DataError, match="cannot be read"):
        read_table(written(tmp_path, b"PAR1", "bad.parquet"))


def test_a_frame_keeps_its_numbers_and_gaps() -> None:
    frame = pd.DataFrame({"a": [1, None, 3], "b": [True, False, True], "c": ["x", None, "z"], "d": pd.Categorical(["u", "v", "u"])})
    table = table_from_frame(frame)
    np.testing.assert_array_equal(table.columns["a"], [1.0, np.nan, 3.0])
    np.testing.assert_array_equal(table.columns["b"], [1.0, 0.0, 1.0])
    assert table.columns["c"].tolist() == ["x", "", "z"]
    assert table.columns["d"].tolist() == ["u", "v", "u"]
    assert table.digest != table_from_frame(frame.assign(a=[1, None, 4])).digest
    dated = table_from_frame(frame.assign(e=pd.to_datetime(["2020-01-01", None, "2020-01-03"])))
    assert dated.columns["e"].tolist() == ["2020-01-01", "", "2020-01-03"]
    for column, said in (([1.0, np.inf, 2.0], "row 2: the value in the column 'e' is infinite"), ([1j, 2, 3], "complex")):
        with pytest.raises(DataError, match=said):
            table_from_frame(frame.assign(e=column))
    with pytest.raises(DataError, match="no row"):
        table_from_frame(frame[:0])
    with pytest.raises(DataError, match="no column"):
        table_from_frame(pd.DataFrame(index=[1, 2]))


@given(
    st.one_of(st.binary(max_size=200), st.text(alphabet=',;"\n\r\t|ab1\ufeff ', max_size=80).map(str.encode)),
    st.sampled_from(["csv", "parquet"]),
)
def test_any_bytes_are_a_table_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes, suffix: str) -> None:
    path = tmp_path_factory.mktemp("fuzz") / f"rows.{suffix}"
    path.write_bytes(data)
    try:
        table = read_table(path)
    except DataError:  # whose text is one line, as of all errors here
        return
    assert isinstance(table, Table)
    assert {len(column) for column in table.columns.values()} == {len(table)}


def test_decimal_commas_are_numbers_where_they_separate_no_cells(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, "a;b\n121,88;1,5\n-3;x,5\n;y\n"))
    np.testing.assert_array_equal(table.numbers("a"), [121.88, -3.0, np.nan])
    assert table.columns["b"].tolist() == ["1,5", "x,5", "y"]


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, b"x", pd.Timedelta("1 day")])
def test_values_that_are_neither_numbers_nor_words_are_refused(value: object) -> None:
    frame = pd.DataFrame({"a": [1, 2]})
    frame["b"] = pd.Series([value, value], dtype=object)
    with pytest.raises(DataError, match=f"'b' holds values of the type {type(value).__name__}"):
        table_from_frame(frame)


def test_columns_of_one_name_are_refused() -> None:
    for names in (["a", "a"], [1, "1"]):
        with pytest.raises(DataError, match="two columns are called"):
            table_from_frame(pd.DataFrame([[1, 2]], columns=names))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_small_file_of_very_many_rows_is_refused_before_they_are_made(tmp_path: Path) -> None:
    """One value, and how often it comes: a million rows take some bytes."""
    path = tmp_path / "rows.parquet"
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1_000_001, dtype=np.int8)), ["x"])
    parquet.write_table(pa.table({f"c{place}": column for place in range(100)}), path)
    with pytest.raises(DataError, match="1,000,001 rows of 100 columns, more than 100,000,000 cells"):
        read_table(path)


@pytest.mark.parametrize("last", ["3.5;2,5;1.5\n", "3.123;2,5;1.123\n"])
def test_a_node_refuses_nothing_because_of_its_points(last: str, tmp_path: Path) -> None:
    """A refusal would tell the server whether all of the node's numbers have three digits behind their points."""
    path = written(tmp_path, "a;x;y\n" + "".join(f"{row}.123;{row},5;1.{100 + row}\n" for row in range(1, 20)) + last)
    bounds: dict[str, Any] = {"a": [0.0, 30.0], "x": [0.0, 30.0], "y": [0.0, 10.0]}
    config = DataConfig(name="node", target="y", columns=["a", "x"], bounds=bounds)
    assert len(read_node_table(config, "number", path).train) == 20
