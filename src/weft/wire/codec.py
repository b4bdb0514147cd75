"""A tensor's values on the wire: in 32, 16 or a little more than 8 bits each.

    float32   IEEE single precision, nothing lost
    half      IEEE half precision
    int8      blocks of 32 values: one exponent each, a signed byte, for all blocks; then a signed byte for each value:
              value = byte * 2^exponent. The largest byte of a block lies between 64 and 127, so there is one way to
              write a block; one whose values are all below 64 * 2^-120 has the exponent -120. (MXINT8 of the Open
              Compute Project's microscaling formats has the same idea.)

Little-endian. Decoded values are always float32, and encoding them again gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from weft.errors import WeftError
from weft.lazy import np, torch
from weft.wire.headers import Precision

if TYPE_CHECKING:
    import numpy.typing as npt

Chunk: TypeAlias = "npt.NDArray[Any]"

BLOCK = 32
PORTION = 2**18  # smaller ones would spend their time on calling, larger ones on memory
BIT_6, BIT_7 = 0x4040404040404040, -0x7F7F7F7F7F7F7F80  # in each of eight bytes
LOWEST, HIGHEST = -120, 120  # exponents: 127 * 2^120 is still a float32, and so is 2^-120
BELOW_ROUNDING_UP = 127.5 / 128

_WIDTH = {"float32": 4, "half": 2}  # bytes of a value


def length(count: int, precision: Precision) -> int:
    """How many bytes so many values take."""
    if precision == "int8":
        return count + _blocks(count)
    return count * _WIDTH[precision]


def values_out(name: str, values: torch.Tensor, precision: Precision) -> list[Chunk]:
    """The values' bytes; what the format cannot carry is a `WeftError`."""
    values = values.detach().cpu().contiguous()
    if not finite(values):
        raise WeftError(
            f"tensor {name!r} holds values that are not finite; the training diverged, lower the learning rate"
        )
    if precision == "int8":
        return _bytes_out(name, values)
    if precision == "half":
        values = values.to(torch.float16)
        if not finite(values):
            raise WeftError(f"tensor {name!r} holds values beyond 65,504, too large for half precision; choose float32")
    return [values.numpy().astype(f"<f{_WIDTH[precision]}", copy=False)]


def values_in(wire: npt.NDArray[np.uint8], count: int, precision: Precision) -> torch.Tensor:
    """The values (count,) out of exactly their bytes; a ValueError says what `values_out` would not have written."""
    if precision == "int8":
        return _bytes_in(wire, count)
    native = torch.float32 if precision == "float32" else torch.float16
    values = own(wire.view(f"<f{_WIDTH[precision]}"), native)
    if not finite(values):
        raise ValueError("holds values that are not finite")
    return values.float()


def count_nonzeros(wire: npt.NDArray[np.uint8], count: int, precision: Precision) -> int:
    if precision == "int8":
        return int(np.count_nonzero(wire[_blocks(count) :]))
    bits = wire.view(f"<u{_WIDTH[precision]}")
    return int(np.count_nonzero(np.left_shift(bits, 1)))  # without its sign, so that -0.0 is the zero that it is


def arriving(values: torch.Tensor, precision: Precision) -> torch.Tensor:
    """The values as they will be when they have been sent, for a sender that remembers what it said."""
    if precision == "float32":
        return values
    wire = np.concatenate([chunk.view(np.uint8) for chunk in values_out("", values, precision)])
    return values_in(wire, values.numel(), precision)


def _bytes_out(name: str, values: torch.Tensor) -> list[Chunk]:
    exponents = torch.empty(_blocks(values.numel()), dtype=torch.int8)
    written = torch.empty(values.numel(), dtype=torch.int8)
    for part, its_exponents, its_bytes in _in_portions(values, exponents, written):
        blocks = _in_blocks(part)
        largest = blocks.abs().amax(dim=1)  # (blocks,)
        fraction, power = torch.frexp(largest)  # largest = fraction * 2^power, fraction in [1/2, 1)
        powers = (power - 7 + (fraction >= BELOW_ROUNDING_UP)).where(largest > 0, LOWEST).clamp_(min=LOWEST)
        if int(powers.max()) > HIGHEST:
            raise WeftError(
                f"tensor {name!r} holds values beyond 127 * 2^{HIGHEST}, too large for int8; choose float32"
            )
        its_exponents.copy_(powers)
        its_bytes.copy_((blocks * _scale(-powers)).round_().view(-1)[: part.numel()])
    return [exponents.numpy(), written.numpy()]


def _bytes_in(wire: npt.NDArray[np.uint8], count: int) -> torch.Tensor:
    signed = own(wire.view(np.int8), torch.int8)
    values = torch.empty(BLOCK * _blocks(count))
    for part, powers, its_bytes in _in_portions(values, signed[: _blocks(count)], signed[_blocks(count) :]):
        blocks = _in_blocks(its_bytes)
        found = _bits(blocks.abs())  # the absolute of -128 is itself, the one with bit 7
        if bool((found & BIT_7).any()) or int(powers.min()) < LOWEST or int(powers.max()) > HIGHEST:
            raise ValueError("holds a byte or an exponent that int8 does not use")
        if bool((((found & BIT_6) == 0) & (powers > LOWEST)).any()):  # no byte of 64 or more
            raise ValueError("holds a block that could be written with a smaller exponent")
        torch.mul(blocks, _scale(powers), out=part.view(-1, BLOCK))
    return values[:count]


def _bits(blocks: torch.Tensor) -> torch.Tensor:
    """Which bits occur in the bytes of each block (blocks, 32): eight bytes of a word say it together, (blocks,)."""
    first, second, third, fourth = blocks.view(torch.int64).unbind(1)
    return first | second | third | fourth


def _in_portions(
    values: torch.Tensor, exponents: torch.Tensor, written: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same part of all three, one after another, each so small that work on it stays in a core's cache."""
    if values.numel():
        yield from zip(
            torch.split(values, PORTION),
            torch.split(exponents, PORTION // BLOCK),
            torch.split(written, PORTION),
            strict=True,
        )


def _scale(exponents: torch.Tensor) -> torch.Tensor:
    """2^exponent, exactly, (blocks, 1)."""
    return torch.ldexp(torch.ones(exponents.numel()), exponents)[:, None]


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """(blocks, 32), zeros behind the end."""
    missing = -values.numel() % BLOCK
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)


def own(array: Chunk, dtype: torch.dtype) -> torch.Tensor:
    """A copy in torch's own, 64-byte aligned allocation: no wire is kept alive, and kernels run at full speed."""
    tensor = torch.empty(array.size, dtype=dtype)
    tensor.numpy()[...] = array
    return tensor


def finite(values: torch.Tensor) -> bool:
    # the extremes hand NaN on, in a twentieth of the time of isfinite().all()
    return values.numel() == 0 or all(math.isfinite(extreme) for extreme in torch.aminmax(values))
