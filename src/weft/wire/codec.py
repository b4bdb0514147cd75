"""Values of a tensor on the wire, with 32, 16 or about 8 bits each.

    float32   IEEE single precision, lossless
    half      IEEE half precision
    int8      blocks of 32 values: first the exponents of all blocks, a signed byte each, then a signed byte per value:
              value = byte * 2^exponent. The largest byte of a block is between 64 and 127, so a block has one encoding;
              the exponent of a block with values below 64 * 2^-120 only is -120. (Like MXINT8 of the Open Compute
              Project's microscaling formats.)

Little-endian. Decoded values are float32; encoding them again gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from weft.errors import WeftError
from weft.lazy import np, torch

if TYPE_CHECKING:
    import numpy.typing as npt

Precision = Literal["float32", "half", "int8"]
Chunk: TypeAlias = "npt.NDArray[Any]"

BLOCK = 32
PORTION = 2**18  # values that are processed at once: they stay in a core's cache, and calls cost little
BIT_6, BIT_7 = 0x4040404040404040, -0x7F7F7F7F7F7F7F80  # in each of eight bytes
LOWEST, HIGHEST = -120, 120  # exponents: 127 * 2^120 is still a float32, and so is 2^-120
BELOW_ROUNDING_UP = 127.5 / 128

_WIDTH = {"float32": 4, "half": 2}  # bytes per value


def length(count: int, precision: Precision) -> int:
    """Number of bytes of `count` values."""
    return count + _blocks(count) if precision == "int8" else count * _WIDTH[precision]


def values_out(name: str, values: torch.Tensor, precision: Precision) -> list[Chunk]:
    """Encode values; raise a `WeftError` for those that the format cannot hold."""
    values = values.detach().cpu().contiguous()
    if not finite(values):
        raise WeftError(f"tensor {name!r} has values that are not finite: training diverged; lower the learning rate")
    if precision == "int8":
        return _int8_out(name, values)
    if precision == "half":
        values = values.to(torch.float16)
        if not finite(values):
            raise WeftError(f"tensor {name!r} has values above 65,504, too large for half; use precision=float32")
    return [values.numpy().astype(f"<f{_WIDTH[precision]}", copy=False)]


def values_in(wire: npt.NDArray[np.uint8], count: int, precision: Precision) -> torch.Tensor:
    """Decode exactly the bytes of `count` values; raise a ValueError for bytes that `values_out` does not write."""
    if precision == "int8":
        return _int8_in(wire, count)
    values = copied(wire.view(f"<f{_WIDTH[precision]}"), torch.float32 if precision == "float32" else torch.float16)
    if not finite(values):
        raise ValueError("has values that are not finite")
    return values.float()


def count_nonzeros(wire: npt.NDArray[np.uint8], count: int, precision: Precision) -> int:
    """Count the nonzeros among encoded values."""
    if precision == "int8":
        return int(np.count_nonzero(wire[_blocks(count) :]))
    bits = wire.view(f"<u{_WIDTH[precision]}")
    return int(np.count_nonzero(np.left_shift(bits, 1)))  # without the sign bit: -0.0 is a zero


def arriving(values: torch.Tensor, precision: Precision) -> torch.Tensor:
    """The values as the receiver will decode them, for a sender that keeps track of what the receiver has."""
    if precision == "float32":
        return values
    wire = np.concatenate([chunk.view(np.uint8) for chunk in values_out("", values, precision)])
    return values_in(wire, values.numel(), precision)


def copied(array: Chunk, dtype: torch.dtype) -> torch.Tensor:
    """Copy into torch's 64-byte aligned memory: it keeps no wire alive, and kernels run at full speed."""
    tensor = torch.empty(array.size, dtype=dtype)
    tensor.numpy()[...] = array
    return tensor


def finite(values: torch.Tensor) -> bool:
    # the extremes propagate NaN, in a twentieth of the time of isfinite().all()
    return values.numel() == 0 or all(math.isfinite(extreme) for extreme in torch.aminmax(values))


def _int8_out(name: str, values: torch.Tensor) -> list[Chunk]:
    exponents = torch.empty(_blocks(values.numel()), dtype=torch.int8)
    encoded = torch.empty(values.numel(), dtype=torch.int8)
    for portion, powers_out, bytes_out in _portions(values, exponents, encoded):
        blocks = _in_blocks(portion)
        largest = blocks.abs().amax(dim=1)  # (blocks,)
        fraction, power = torch.frexp(largest)  # largest = fraction * 2^power, fraction in [1/2, 1)
        powers = (power - 7 + (fraction >= BELOW_ROUNDING_UP)).where(largest > 0, LOWEST).clamp_(min=LOWEST)
        if int(powers.max()) > HIGHEST:
            raise WeftError(
                f"tensor {name!r} has values above 127 * 2^{HIGHEST}, too large for int8; use precision=float32"
            )
        powers_out.copy_(powers)
        bytes_out.copy_((blocks * _scale(-powers)).round_().view(-1)[: portion.numel()])
    return [exponents.numpy(), encoded.numpy()]


def _int8_in(wire: npt.NDArray[np.uint8], count: int) -> torch.Tensor:
    signed = copied(wire.view(np.int8), torch.int8)
    values = torch.empty(BLOCK * _blocks(count))
    for portion, powers, encoded in _portions(values, signed[: _blocks(count)], signed[_blocks(count) :]):
        blocks = _in_blocks(encoded)
        first, second, third, fourth = blocks.abs().view(torch.int64).unbind(1)  # the absolute of -128 has bit 7
        bits = first | second | third | fourth  # (blocks,): the bits that occur in any byte of a block
        if bool((bits & BIT_7).any()) or int(powers.min()) < LOWEST or int(powers.max()) > HIGHEST:
            raise ValueError("has a byte or an exponent that int8 does not use")
        if bool((((bits & BIT_6) == 0) & (powers > LOWEST)).any()):  # no byte of 64 or more
            raise ValueError("has a block that needs a smaller exponent")
        torch.mul(blocks, _scale(powers), out=portion.view(-1, BLOCK))
    return values[:count]


def _portions(
    values: torch.Tensor, exponents: torch.Tensor, encoded: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    if values.numel():
        sizes = ((values, PORTION), (exponents, PORTION // BLOCK), (encoded, PORTION))
        yield from zip(*(torch.split(tensor, size) for tensor, size in sizes), strict=True)


def _scale(exponents: torch.Tensor) -> torch.Tensor:
    """2^exponent, exactly, (blocks, 1)."""
    return torch.ldexp(torch.ones(exponents.numel()), exponents)[:, None]


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """(blocks, 32), padded with zeros."""
    missing = -values.numel() % BLOCK
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)
