"""Bytes of a tensor: the positions of its values, then the values.

    dense         values
    rows          one bit per row (kept or not), values of the kept rows
    sparse-gaps   one byte per value: the number of positions skipped before it; 255 stands for a larger gap, which is
                  in the uint32 array that follows; then the values
    sparse-mask   one bit per position, values
                  (the shorter of the two; gaps if they tie)

Values have 32, 16, about 8 or about 4 bits each:

    float32   IEEE single precision, lossless
    half      IEEE half precision
    int8      blocks of 32 values: first the exponents of all blocks, a signed byte each, then a signed byte per value:
              value = byte * 2^exponent. The largest byte of a block is between 64 and 127, so a block has one encoding;
              the exponent of a block with values below 64 * 2^-120 only is -120. (Like MXINT8 of the Open Compute
              Project's microscaling formats.)
    int4      the same with four bits per value, two values in a byte, the first in its low half: the largest of a block
              is between 4 and 7

Little-endian. Decoded values are float32; encoding them again gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from weft.errors import WeftError
from weft.lazy import np, torch

if TYPE_CHECKING:
    import numpy.typing as npt

Precision = Literal["float32", "half", "int8", "int4"]
Chunk: TypeAlias = "npt.NDArray[Any]"
Take: TypeAlias = "Callable[[int], npt.NDArray[np.uint8]]"  # the next bytes of a payload

BLOCK = 32
PORTION = 2**18  # values that are processed at once: they stay in a core's cache, and calls cost little
BITS = {"int8": 8, "int4": 4}  # of a quantized value
# in each of eight bytes: the bit that the largest value of a block has, and the next one, which only -128 or -8 has
LARGE_BIT = {8: 0x4040404040404040, 4: 0x0404040404040404}
UNUSED_BIT = {8: -0x7F7F7F7F7F7F7F80, 4: 0x0808080808080808}
LOWEST, HIGHEST = -120, 120  # exponents: 127 * 2^120 is still a float32, and so is 2^-120

ESCAPE = 255

_WIDTH = {"float32": 4, "half": 2}  # bytes per value


# ---- values ----------------------------------------------------------------------------------------------------------


def length(count: int, precision: Precision) -> int:
    """Number of bytes of `count` values."""
    if precision in BITS:
        return _packed(count, BITS[precision]) + _blocks(count)
    return count * _WIDTH[precision]


def values_out(name: str, values: torch.Tensor, precision: Precision) -> list[Chunk]:
    """Encode values; raise a `WeftError` for those that the format cannot hold."""
    values = values.detach().cpu().contiguous()
    if not finite(values):
        raise WeftError(f"tensor {name!r} has values that are not finite: training diverged; lower the learning rate")
    if precision in BITS:
        return _quantize(name, values, BITS[precision])
    if precision == "half":
        values = values.to(torch.float16)
        if not finite(values):
            raise WeftError(f"tensor {name!r} has values above 65,504, too large for half; use precision=float32")
    return [values.numpy().astype(f"<f{_WIDTH[precision]}", copy=False)]


def values_in(wire: npt.NDArray[np.uint8], count: int, precision: Precision) -> torch.Tensor:
    """Decode exactly the bytes of `count` values; raise a ValueError for bytes that `values_out` does not write."""
    if precision in BITS:
        return _dequantize(wire, count, BITS[precision])
    values = copied(wire.view(f"<f{_WIDTH[precision]}"), torch.float32 if precision == "float32" else torch.float16)
    if not finite(values):
        raise ValueError("has values that are not finite")
    return values.float()


def count_nonzeros(wire: npt.NDArray[np.uint8], count: int, precision: Precision) -> int:
    """Count the nonzeros among encoded values."""
    if precision in BITS:
        codes = wire[_blocks(count) :]
        if precision == "int4":
            codes = np.stack([codes & 0x0F, codes & 0xF0])
        return int(np.count_nonzero(codes))
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


def _quantize(name: str, values: torch.Tensor, bits: int) -> list[Chunk]:
    exponents = torch.empty(_blocks(values.numel()), dtype=torch.int8)
    codes = torch.empty(values.numel(), dtype=torch.int8)
    most = 2 ** (bits - 1)
    for portion, powers_out, codes_out in _portions(values, exponents, codes):
        blocks = _in_blocks(portion)
        largest = blocks.abs().amax(dim=1)  # (blocks,)
        fraction, power = torch.frexp(largest)  # largest = fraction * 2^power, fraction in [1/2, 1)
        rounds_up = fraction >= (most - 0.5) / most
        powers = (power - (bits - 1) + rounds_up).where(largest > 0, LOWEST).clamp_(min=LOWEST)
        if int(powers.max()) > HIGHEST:
            limit = f"{most - 1} * 2^{HIGHEST}"
            raise WeftError(f"tensor {name!r} has values above {limit}, too large for int{bits}; use precision=float32")
        powers_out.copy_(powers)
        codes_out.copy_((blocks * _scale(-powers)).round_().view(-1)[: portion.numel()])
    return [exponents.numpy(), (codes if bits == 8 else _pack(codes)).numpy()]


def _dequantize(wire: npt.NDArray[np.uint8], count: int, bits: int) -> torch.Tensor:
    signed = copied(wire.view(np.int8), torch.int8)
    exponents, codes = signed[: _blocks(count)], signed[_blocks(count) :]
    if bits == 4:
        codes = _unpack(codes, count)
    values = torch.empty(BLOCK * _blocks(count))
    for portion, powers, encoded in _portions(values, exponents, codes):
        blocks = _in_blocks(encoded)
        first, second, third, fourth = blocks.abs().view(torch.int64).unbind(1)  # the absolute of -128 has bit 7
        occurring = first | second | third | fourth  # (blocks,): the bits that occur in any byte of a block
        unused = bool((occurring & UNUSED_BIT[bits]).any())
        if unused or int(powers.min()) < LOWEST or int(powers.max()) > HIGHEST:
            raise ValueError(f"has a value or an exponent that int{bits} does not use")
        if bool((((occurring & LARGE_BIT[bits]) == 0) & (powers > LOWEST)).any()):
            raise ValueError("has a block that needs a smaller exponent")
        torch.mul(blocks, _scale(powers), out=portion.view(-1, BLOCK))
    return values[:count]


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Two values of four bits in each byte, the first in its low half."""
    low, high = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(-1, 2).unbind(1)
    return (low & 0x0F) | (high << 4)


def _unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    codes = torch.stack([(packed << 4) >> 4, packed >> 4], dim=1).view(-1)  # shifts keep the sign
    if codes[count:].any():
        raise ValueError("has a value beyond its end")
    return codes[:count]


def _portions(
    values: torch.Tensor, exponents: torch.Tensor, encoded: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    if values.numel():
        sizes = ((values, PORTION), (exponents, PORTION // BLOCK), (encoded, PORTION))
        yield from zip(*(torch.split(tensor, size) for tensor, size in sizes), strict=True)


def _scale(exponents: torch.Tensor) -> torch.Tensor:
    """2^exponent, exactly, (blocks, 1)."""
    return torch.ldexp(torch.ones(exponents.numel()), exponents)[:, None]


def _packed(count: int, bits: int) -> int:
    """Bytes of `count` quantized values."""
    return -(-count * bits // 8)


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """(blocks, 32), padded with zeros."""
    missing = -values.numel() % BLOCK
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)


# ---- positions: a ValueError for bytes that are not the one encoding -------------------------------------------------


def mask_out(mask: npt.NDArray[np.bool_]) -> Chunk:
    """Encode one bit per item."""
    return np.packbits(mask, bitorder="little")


def mask_in(take: Take, count: int) -> npt.NDArray[np.bool_]:
    """Decode the bits of `count` items."""
    bits = np.unpackbits(take(_mask_length(count)), bitorder="little").view(np.bool_)
    if bits[count:].any():
        raise ValueError("has a mask with bits beyond its end")
    return bits[:count]


def indices_out(size: int, indices: npt.NDArray[np.int32]) -> tuple[Literal["sparse-gaps", "sparse-mask"], list[Chunk]]:
    """Encode the positions of a sparse tensor in the shorter of two ways."""
    gaps = _gaps(indices)
    if _mask_is_smaller(size, gaps):
        mask = np.zeros(size, dtype=np.bool_)
        mask[indices] = True
        return "sparse-mask", [mask_out(mask)]
    return "sparse-gaps", [np.minimum(gaps, ESCAPE).astype(np.uint8), gaps[gaps >= ESCAPE].astype("<u4")]


def masked_in(take: Take, size: int, precision: Precision) -> tuple[Chunk, Chunk]:
    """Decode the positions of a sparse tensor from a mask; return them and the bytes of the values."""
    mask = mask_in(take, size)
    values = take(length(int(np.count_nonzero(mask)), precision))  # before indices take eight times as much memory
    indices = np.flatnonzero(mask)
    if not _mask_is_smaller(size, _gaps(indices)):
        raise ValueError("has a mask where gaps are not longer")
    return indices, values


def gaps_in(take: Take, size: int, count: int, precision: Precision) -> tuple[Chunk, Chunk]:
    """Decode the positions of a sparse tensor from `count` gaps; return them and the bytes of the values."""
    short = take(count)
    large = short == ESCAPE
    escaped = take(4 * int(np.count_nonzero(large))).view("<u4")
    values = take(length(count, precision))
    gaps = short.astype(np.int64)
    gaps[large] = escaped
    indices = np.cumsum(gaps + 1) - 1  # below 2**63: fewer than 2**31 gaps, each below 2**32
    if indices.size and indices[-1] >= size:
        raise ValueError(f"has the index {indices[-1]:,}, beyond its size {size:,}")
    if escaped.size and escaped.min() < ESCAPE:
        raise ValueError(f"has an escaped gap of {escaped.min()}, which needs no escape")
    if _mask_is_smaller(size, gaps):
        raise ValueError("has gaps where a mask is shorter")
    return indices, values


def _gaps(indices: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Number of positions skipped before each index: (count,), at least 0 because indices increase."""
    return np.diff(indices, prepend=np.array(-1, dtype=indices.dtype)) - 1


def _mask_is_smaller(size: int, gaps: npt.NDArray[Any]) -> bool:
    return _mask_length(size) < gaps.size + 4 * int(np.count_nonzero(gaps >= ESCAPE))


def _mask_length(count: int) -> int:
    return (count + 7) // 8
