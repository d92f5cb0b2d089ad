"""Small models that cover what sharding finds hard, each with its data and its loss.

Every case is built from a seed, so all ranks and the single-process reference start equal.
The batch is the whole, global one; `Case.part` cuts out what one rank trains on. It divides
by 1, 2, 3 and 4, so the mean of the ranks' losses is the loss of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BATCH = 12


class Scale(nn.Module):
    """One single element: with two ranks and more, most ranks own nothing but padding."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class WithEmptyParameter(nn.Module):
    """A parameter without elements beside one of a size that divides by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.shift = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift + self.nothing.sum()


class UnevenMLP(nn.Module):
    """Sizes that never divide evenly, among them 6, 12 and 63 elements, and one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 9),
            nn.Tanh(),
            nn.Linear(9, 7, bias=False),
            WithEmptyParameter(),
            nn.Tanh(),
            nn.Linear(7, 3),
            nn.Linear(3, 3),
            nn.Tanh(),
            nn.Linear(3, 5),
            Scale(),
            nn.Linear(5, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Block(nn.Module):
    """A transformer block: causal attention and an MLP, each behind a layer norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, num_heads=2, batch_first=True)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 13), nn.GELU(), nn.Linear(13, width))

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        y = self.norm_1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, blocks: int = 2, vocabulary: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(6, width) * 0.1)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TiedTransformer(Transformer):
    """The output layer is the embedding; both stay in the root unit."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.head.weight = self.embedding.weight


class Residual(nn.Module):
    """Convolution and batch norm with a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.convolution(x)))


class ConvNet(nn.Module):
    """Buffers that change in the forward: running statistics, local to each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3)
        self.blocks = nn.Sequential(Residual(3), Residual(3))
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class UnusedBranch(nn.Module):
    """One branch is never called, anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 5)
        self.never = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.used(x)))


class FrozenMix(nn.Module):
    """Frozen parameters beside trainable ones in one layer, and a layer frozen whole."""

    def __init__(self) -> None:
        super().__init__()
        self.partly = nn.Linear(4, 5)
        self.frozen = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)
        self.partly.bias.requires_grad_(False)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.frozen(torch.tanh(self.partly(x)))))


class MixedDtypes(nn.Module):
    """Parameters of two dtypes, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.in_float32 = nn.Linear(4, 5, dtype=torch.float32)
        self.in_float64 = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.in_float64(torch.tanh(self.in_float32(x.float())).double())


def numbers(*shape: int) -> Callable[[torch.dtype], Tensor]:
    """Return a function that draws a batch of numbers in a dtype."""
    return lambda dtype: torch.randn(BATCH, *shape, dtype=dtype)


def tokens(_: torch.dtype) -> Tensor:
    return torch.randint(0, 11, (BATCH, 6))


def mean_square(output: Tensor, x: Tensor) -> Tensor:
    """Distance to a target that depends on the input."""
    target = torch.sin(x.to(output.dtype).flatten(1).sum(1, keepdim=True))
    return (output - target).square().mean()


def next_token(logits: Tensor, x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


@dataclass(frozen=True)
class Case:
    """A model with what is needed to train it.

    Attributes:
        build: Makes the model; call `Case.model` for a seeded one.
        draw: Draws a global batch in a dtype.
        loss: From output and input to a mean loss.
        unit_classes: Module classes that make good units.
        keeps_dtype: The model has dtypes of its own; do not convert it.
        unused: Prefix of the parameters that no forward uses.
    """

    build: Callable[[], nn.Module]
    draw: Callable[[torch.dtype], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    unit_classes: tuple[type[nn.Module], ...]
    keeps_dtype: bool = False
    unused: str | None = None

    def model(self, dtype: torch.dtype, seed: int = 0) -> nn.Module:
        """Build the model: equal on all ranks and in the reference."""
        torch.manual_seed(seed)
        model = self.build()
        return model if self.keeps_dtype else model.to(dtype)

    def batches(self, steps: int, dtype: torch.dtype) -> list[Tensor]:
        """Draw the global batches, equal everywhere."""
        torch.manual_seed(1)
        return [self.draw(dtype) for _ in range(steps)]


def part(batch: Tensor, rank: int, world_size: int) -> Tensor:
    """Cut out what one rank trains on."""
    return batch[rank::world_size]


CASES: dict[str, Case] = {
    "uneven": Case(UnevenMLP, numbers(4), mean_square, (nn.Linear, Scale, WithEmptyParameter)),
    "transformer": Case(Transformer, tokens, next_token, (Block,)),
    "tied": Case(TiedTransformer, tokens, next_token, (Block,)),
    "conv": Case(ConvNet, numbers(2, 5, 5), mean_square, (Residual,)),
    "unused": Case(UnusedBranch, numbers(4), mean_square, (nn.Linear,), unused="never."),
    "frozen": Case(FrozenMix, numbers(4), mean_square, (nn.Linear,)),
    "dtypes": Case(MixedDtypes, numbers(4), mean_square, (), keeps_dtype=True),
}
