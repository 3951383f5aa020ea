"""Reconstruct images of a class that a client does not hold, from the global model that it is sent.

The attacker is the honest-but-curious client of LaDP-FL, section IV: it follows the protocol, holds no image of one
class, and trains a conditional GAN on the global model. Two things keep its two sources apart:

- What the private class looks like comes from the global model alone, frozen, as the auxiliary classifier.
- What an image looks like at all comes from the client's own images alone. The discriminator is a second, trainable copy
  of the global model; its score is the log-sum-exp of the logits (Salimans et al. 2016), so that no layer is added.
  It is never shown a generated image of a class without real examples: "private class" would become a mark of a fake, and
  the generator would be pushed away from just what it is to find.

Differences from the sources. Hitaj et al. 2017 attack during training and inject generated images under a false label,
so that the victim gives more away; this attack is passive and uses one model. ACGAN (Odena et al. 2017) has one network
with two heads, both trained on real images of all classes; here the classifier stays frozen, since further training on
the client's own images would erase the class, and only the real/fake copy learns. LaDP-FL names ACGAN and the two
architectures and gives no sizes, losses or steps: those below are this project's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, isfinite, prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldpfl.data import Samples
from ldpfl.errors import ConfigError, DataError
from ldpfl.models import InputShape
from ldpfl.models.layout import ParameterLayout, called_with
from ldpfl.util.seeded_torch import SeededDraws

Progress = Callable[[int, int], None]

_BATCH = 256
"""Images generated at once."""


@dataclass(frozen=True)
class GanConfig:
    """How the attack is trained; the defaults take about two minutes of one core on a two-layer CNN and images of 28 x 28.

    Images that an attack with the defaults draws from an unprotected model are recognised as the attacked digit.

    Attributes:
        steps: number of steps, each of which updates the discriminator and then the generator.
        batch_size: number of real images in a step, and of generated ones.
        latent: length of the generator's noise vector.
        width: channels of the generator's first feature map; halved by each deconvolution.
        generator_learning_rate, discriminator_learning_rate: learning rates of Adam, with betas 0.5 and 0.999 as in DCGAN.
        label_share: fraction of the generated images of a step that have the attacked class as their label.
        class_weight: factor of the frozen classifier's cross-entropy beside the real/fake loss.
        shift: largest shift in pixels, up, down and sideways, before an image is judged; real images are few, and a
            generator that must please the classifier at every shift finds shapes instead of adversarial pixels.
        noise: standard deviation of the noise added for the same reason; pixels lie in [0, 1].
    """

    steps: int = 1500
    batch_size: int = 64
    latent: int = 64
    width: int = 64
    generator_learning_rate: float = 4e-4
    discriminator_learning_rate: float = 2e-4
    label_share: float = 0.25
    class_weight: float = 1.0
    shift: int = 3
    noise: float = 0.1

    def __post_init__(self) -> None:
        smallest = {"steps": 1, "batch_size": 2, "latent": 1, "width": 4, "shift": 0}
        for name, least in smallest.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} of the attack must be at least {least}, got {getattr(self, name)}")
        for name in ("generator_learning_rate", "discriminator_learning_rate", "class_weight"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(f"{name} of the attack must be a positive number, got {getattr(self, name)}")
        if not 0 < self.label_share < 1:
            raise ConfigError(f"label_share of the attack must lie between 0 and 1, got {self.label_share}")
        if not (isfinite(self.noise) and self.noise >= 0):
            raise ConfigError(f"noise of the attack must be 0 or a positive number, got {self.noise}")


@dataclass(frozen=True)
class Target:
    """The global model as a client gets it.

    Attributes:
        module: the architecture; its own parameters are neither used nor changed, except those that are not trained.
        weights: (d,) float32, of the last broadcast.
        mean, std: public constants that normalise pixels, per channel.
    """

    module: nn.Module
    layout: ParameterLayout
    weights: Tensor
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def parameters(self, device: torch.device) -> dict[str, Tensor]:
        """Return the weights by name, as copies on ``device``."""
        return {name: value.detach().clone() for name, value in self.layout.unflatten(self.weights.to(device)).items()}

    def logits(self, parameters: dict[str, Tensor], images: Tensor) -> Tensor:
        """Return the logits (N, classes) for ``images`` (N, C, H, W) in [0, 1], under ``parameters``."""
        mean, std = (images.new_tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
        return torch.as_tensor(called_with(self.module, parameters, ((images - mean) / std,)))


class Generator(nn.Module):
    """Network that maps noise and a class to an image. Each of two deconvolutions doubles height and width (DCGAN, Radford et al. 2016)."""

    def __init__(self, shape: InputShape, classes: int, *, latent: int = GanConfig.latent, width: int = GanConfig.width) -> None:
        """Build the layers: a quarter of the image's height and width, rounded up, which two deconvolutions enlarge fourfold.

        The argument ``width`` is a number of channels, the attribute ``width`` that of the image in pixels.
        """
        super().__init__()
        channels, self.height, self.width = shape
        self.latent, self.classes = latent, classes
        start_shape = (width, ceil(self.height / 4), ceil(self.width / 4))
        self.start = nn.Sequential(
            nn.Linear(latent + classes, prod(start_shape)),
            nn.Unflatten(1, start_shape),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )
        self.deconvolutions = nn.Sequential(
            nn.ConvTranspose2d(width, width // 2, 4, stride=2, padding=1),
            nn.BatchNorm2d(width // 2),
            nn.ReLU(),
            nn.ConvTranspose2d(width // 2, width // 4, 4, stride=2, padding=1),
            nn.BatchNorm2d(width // 4),
            nn.ReLU(),
            nn.Conv2d(width // 4, channels, 3, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Return images (N, C, H, W) in [0, 1] for ``noise`` (N, latent) and ``labels`` (N,)."""
        hidden = self.start(torch.cat([noise, F.one_hot(labels, self.classes).to(noise.dtype)], dim=1))
        # Heights and widths that are no multiple of four come out too large.
        return torch.as_tensor(self.deconvolutions(hidden)[..., : self.height, : self.width])


def attack(
    target: Target, own: Samples, label: int, count: int, config: GanConfig, seed: int, progress: Progress = lambda done, total: None
) -> tuple[Generator, Tensor]:
    """Train a generator on ``target`` and return it with ``count`` images (count, C, H, W) uint8 of class ``label``.

    A pure function of its arguments: equal arguments give equal bits on one machine. Raises the errors of :func:`train_generator` and
    :func:`generate`.
    """
    generator = train_generator(target, own, label, config, seed, progress)
    return generator, generate(generator, label, count, seed)


def train_generator(
    target: Target, own: Samples, label: int, config: GanConfig, seed: int, progress: Progress = lambda done, total: None
) -> Generator:
    """Train a generator on the global model and the client's own images; all randomness comes from ``seed``.

    Args:
        own: the attacking client's images, and nobody else's. If some are of the class ``label``, they are used like all others.
        label: the class to be reconstructed.
        progress: called with (steps done, steps) after each step; may raise to end the attack.

    Raises:
        ConfigError: the label is none of the model's classes.
        DataError: the client has no image, the weights are not finite, or the training went to NaN.

    Source: LaDP-FL, sections IV and VII-A; see the module for what is changed. Confidence: the paper gives the idea only.
    """
    _check_target(target, own, label)
    random = torch.Generator().manual_seed(seed)
    training = _AdversarialTraining(target, own, label, config, random)
    for step in range(config.steps):
        if not isfinite(training.step()):
            raise DataError(f"the attack's loss became NaN or infinite at step {step + 1}: set the learning rates in GanConfig lower")
        progress(step + 1, config.steps)
    return training.generator.eval()


def generate(generator: Generator, label: int, count: int, seed: int) -> Tensor:
    """Return ``count`` images (count, C, H, W) uint8 of class ``label``, on the CPU; equal arguments give equal bits.

    Raises:
        ConfigError: the label is none of the generator's classes, or the count is below 1.
    """
    if not 0 <= label < generator.classes:
        raise ConfigError(f"label must be 0 to {generator.classes - 1}, got {label}")
    if count < 1:
        raise ConfigError(f"count must be at least 1, got {count}")
    device = next(generator.parameters()).device
    noise = torch.randn(count, generator.latent, generator=torch.Generator().manual_seed(seed))
    generator.eval()
    with torch.no_grad():
        images = [generator(part.to(device), torch.full((len(part),), label, device=device)).cpu() for part in torch.split(noise, _BATCH)]
    return torch.cat(images).mul(255).round().to(torch.uint8)


def _check_target(target: Target, own_images: Samples, label: int) -> None:
    """Raise an error unless the label is a class, the client has images, and the weights are finite."""
    if not 0 <= label < target.classes:
        raise ConfigError(f"the model has no class {label}: expected a label from 0 to {target.classes - 1}")
    if len(own_images) == 0:
        raise DataError("the attacking client has no images, but it needs real images to compare generated ones with: give it at least one")
    if not bool(torch.isfinite(target.weights).all()):
        raise DataError("the global model has NaN or infinite weights, so it cannot be attacked: attack another run")


class _AdversarialTraining:
    """The training of generator and discriminator against each other."""

    def __init__(self, target: Target, own_images: Samples, label: int, config: GanConfig, random: torch.Generator) -> None:
        """Copy the global model twice: frozen, as the classifier, and trainable, as the discriminator. Create the generator."""
        self._target, self._label, self._config, self._random = target, label, config, random
        self._device = own_images.tensor.device
        self._real = own_images.tensor.float() / 255
        self._held_classes = torch.unique(own_images.targets.cpu())
        self._frozen = target.parameters(self._device)
        self._discriminator = {name: value.requires_grad_() for name, value in target.parameters(self._device).items()}
        with torch.no_grad():
            # Scores are taken relative to the mean score of the real images, so that the first steps do not saturate.
            scores = [target.logits(self._frozen, part).logsumexp(1) for part in torch.split(self._real, _BATCH)]
        self._mean_real_score = torch.cat(scores).mean()
        self.generator = _new_generator(target, tuple(own_images.tensor.shape[1:]), config, random).to(self._device)
        betas = (0.5, 0.999)  # as in DCGAN
        self._generator_optimiser = torch.optim.Adam(self.generator.parameters(), config.generator_learning_rate, betas)
        self._discriminator_optimiser = torch.optim.Adam(self._discriminator.values(), config.discriminator_learning_rate, betas)

    def step(self) -> float:
        """Update the discriminator, then the generator; return the sum of both losses."""
        config = self._config
        labels = self._draw_labels()
        real = self._real[torch.randint(len(self._real), (config.batch_size,), generator=self._random).to(self._device)]
        noise = torch.randn(config.batch_size, config.latent, generator=self._random).to(self._device)
        fake = self.generator(noise, labels)

        # The loss is softplus(-score) for an image that should count as real, and softplus(score) for one that should count as generated.
        # Generated images of the attacked class are left out here: to the discriminator, the class would become a mark of a fake.
        has_real_examples = torch.isin(labels, self._held_classes.to(self._device))
        discriminator_loss = F.softplus(-self._score(real)).mean() + F.softplus(self._score(fake.detach()[has_real_examples])).mean()
        _take_optimiser_step(self._discriminator_optimiser, discriminator_loss)

        generator_loss = F.softplus(-self._score(fake)).mean()
        class_loss = F.cross_entropy(self._target.logits(self._frozen, self._shifted_and_noisy(fake)), labels)
        _take_optimiser_step(self._generator_optimiser, generator_loss + config.class_weight * class_loss)
        return float(discriminator_loss.detach() + generator_loss.detach() + class_loss.detach())

    def _draw_labels(self) -> Tensor:
        """Draw the classes of a step's generated images. A fixed share is the attacked class, and the client holds the others."""
        size = self._config.batch_size
        attacked = min(max(1, round(size * self._config.label_share)), size - 1)  # at least one image of either kind
        others = self._held_classes[torch.randint(len(self._held_classes), (size - attacked,), generator=self._random)]
        return torch.cat([torch.full((attacked,), self._label), others]).to(self._device)

    def _score(self, images: Tensor) -> Tensor:
        """Return the discriminator's score (N,) of each image, which is high for real images."""
        return self._target.logits(self._discriminator, self._shifted_and_noisy(images)).logsumexp(1) - self._mean_real_score

    def _shifted_and_noisy(self, images: Tensor) -> Tensor:
        """Shift each image by its own offset, filling with black, and add noise."""
        config = self._config
        offsets = torch.randint(-config.shift, config.shift + 1, (len(images), 2), generator=self._random).to(self._device)
        noise = torch.randn(images.shape, generator=self._random).to(self._device)
        return shifted(images, offsets) + config.noise * noise


def shifted(images: Tensor, offsets: Tensor) -> Tensor:
    """Return ``images`` (N, C, H, W), each moved down and right by its row of ``offsets`` (N, 2). The uncovered edge is black."""
    count, _, height, width = images.shape
    rows = torch.arange(height, device=images.device) - offsets[:, :1]
    columns = torch.arange(width, device=images.device) - offsets[:, 1:]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    image_index = torch.arange(count, device=images.device)[:, None, None]
    # Indexing with three index arrays moves the channels to the end: (N, H, W, C).
    moved = images[image_index, :, rows.clamp(0, height - 1)[:, :, None], columns.clamp(0, width - 1)[:, None, :]]
    return moved.permute(0, 3, 1, 2) * inside[:, None]


def _new_generator(target: Target, shape: tuple[int, ...], config: GanConfig, random: torch.Generator) -> Generator:
    """Return an untrained generator of images of this ``shape`` (C, H, W). Its initial weights follow from ``random``."""
    channels, height, width = shape
    with SeededDraws(int(torch.randint(2**62, (), generator=random))):
        return Generator((channels, height, width), target.classes, latent=config.latent, width=config.width)


def _take_optimiser_step(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take one optimiser step on ``loss``."""
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
