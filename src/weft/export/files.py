"""The files that a model is taken home in, written and opened again.

onnx          a graph for onnxruntime and whatever else reads ONNX     facts in its metadata, under "weft"
pt2           a program for torch.export.load, which needs torch alone     facts in its file weft.json
safetensors   the tensors by name; whoever reads them brings the network     facts in its metadata, under "weft"
"""

from __future__ import annotations

import contextlib
import json
import logging
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from weft.errors import WeftError
from weft.registry import error_line

if TYPE_CHECKING:
    from weft.export.model import Facts, Plain, Taken

Format = Literal["safetensors", "onnx", "pt2"]
FORMATS: tuple[Format, ...] = ("safetensors", "onnx", "pt2")
TOLERANCE = 1e-3  # of logits, beside those of the run; other orders of summing give a thousandth of it
NEEDS = "needs onnx, onnxscript and onnxruntime: pip install 'weft[export]'"

Images = NDArray[np.uint8]  # (batch, height, width, 3)
Answers = tuple[NDArray[np.float32], NDArray[np.float32]]  # logits, and what a person wants to read
Run = Callable[[Images], Answers]


def write(taken: Taken, path: Path, kind: Format) -> float:
    """Write the file, open it again and hold it against the run; gives the largest difference of a logit.

    The file is there whole and checked, or not at all.
    """
    if not path.parent.is_dir():
        raise WeftError(f"{path} cannot be written: there is no folder {path.parent}; choose another --out")
    partial = path.with_name(f".{path.name}.part.{kind}")
    try:
        WRITE[kind](taken.model, taken.facts, partial)
        run, _ = open_model(partial, kind, trusted=True)
        logits, _ = run(taken.images.numpy())
        wanted = taken.logits.numpy()
        difference = float(np.abs(logits - wanted).max())
        if not difference <= TOLERANCE * max(1.0, float(np.abs(wanted).max())):
            raise WeftError(f"the exported model answers otherwise than the run (by {difference:.3g}); it is not kept")
        partial.replace(path)
    except OSError as error:
        raise WeftError(f"{path} cannot be written ({error.strerror or error}); choose another --out") from None
    finally:
        partial.unlink(missing_ok=True)
    return difference


def _write_safetensors(model: Plain, facts: Facts, path: Path) -> None:
    import safetensors.torch

    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(tensors, path, metadata={"weft": json.dumps(facts)})


def _write_pt2(model: Plain, facts: Facts, path: Path) -> None:
    import torch

    with _quiet():
        program, told_along = _program(model, facts)
        try:
            torch.export.save(program, path, extra_files={"weft.json": json.dumps(told_along)})
        except RuntimeError as error:  # so torch tells of a full disk
            raise OSError(error_line(error)) from None


def _write_onnx(model: Plain, facts: Facts, path: Path) -> None:
    try:
        import onnxruntime  # noqa: F401 - the file is checked with it
        import onnxscript  # noqa: F401 - torch.onnx is written in it
    except ImportError:
        raise WeftError(f"--format onnx {NEEDS}; --format safetensors needs nothing more") from None
    import torch

    with _quiet():
        program, told_along = _program(model, facts)
        names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits", facts["answers"]]}
        try:
            found = torch.onnx.export(program, dynamo=True, verbose=False, **names)
        except Exception as error:
            raise WeftError(f"the network {facts['network']} cannot be written as ONNX: {error_line(error)}") from error
        assert found is not None
        found.model.metadata_props["weft"] = json.dumps(told_along)
        found.save(str(path))


def _program(model: Plain, facts: Facts) -> tuple[Any, Facts]:
    """The model as torch traces it, for any number of images at once; for one, if its code counts them (`len(x)`)."""
    import torch

    dynamic: tuple[Any, ...] = ({0: torch.export.Dim("batch")},)
    problem = None
    for batch, shapes in (("any", dynamic), (1, None)):
        example = torch.zeros((2 if batch == "any" else 1, *facts["image"]), dtype=torch.uint8)
        try:
            program = torch.export.export(model, (example,), dynamic_shapes=shapes, strict=False)
        except Exception as error:
            problem = error
            continue
        return program, {**_without_code(facts), "batch": batch}
    assert problem is not None
    raise WeftError(f"the network {facts['network']} cannot be exported by torch: {error_line(problem)}") from problem


def _without_code(facts: Facts) -> Facts:
    """A graph is complete: it names no code, and so no path of the machine that it was made on."""
    return {key: value for key, value in facts.items() if key not in ("network", "network_options", "loss")}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch's exporters warn of their own future, and of packages that are not needed here."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


WRITE: dict[Format, Callable[[Plain, Facts, Path], None]] = {
    "safetensors": _write_safetensors,
    "onnx": _write_onnx,
    "pt2": _write_pt2,
}


# ---- opening ---------------------------------------------------------------------------------------------------------


def open_model(path: Path, kind: str | None = None, trusted: bool = False) -> tuple[Run, Facts]:
    """A function from images to answers, and the facts, of a file of any of the formats; by its ending if not said.

    Only a trusted file may name code that is run: a network or loss of somebody's own, or all that pickle can do.
    """
    kind = kind or path.suffix.removeprefix(".")
    if kind not in OPEN:
        raise WeftError(f"{path} ends in none of {', '.join(f'.{each}' for each in FORMATS)}; weft export wrote which?")
    if not path.is_file():
        raise WeftError(f"there is no file {path}; weft export makes one")
    if kind == "pt2" and not trusted:
        raise WeftError(f"torch opens {path} with pickle, which can run anything: add --trust if you know who wrote it")
    try:
        run, facts = OPEN[kind](path, trusted)
        return (_one_by_one(run) if facts.get("batch") == 1 else run), facts
    except WeftError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, struct.error, zipfile.BadZipFile) as error:
        raise WeftError(f"{path} is no model that weft export wrote: {error_line(error)}") from None


def _one_by_one(run: Run) -> Run:
    def each(images: Images) -> Answers:
        found = [run(images[place : place + 1]) for place in range(len(images))]
        return np.concatenate([logits for logits, _ in found]), np.concatenate([answer for _, answer in found])

    return each


def _open_safetensors(path: Path, trusted: bool) -> tuple[Run, Facts]:
    import safetensors.torch

    from weft.export.model import rebuilt

    try:
        with safetensors.safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["weft"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from None
    own = [str(facts[key]) for key in ("network", "loss") if ":" in str(facts[key])]
    if own and not trusted:
        raise WeftError(f"{path} names code to run ({', '.join(own)}): add --trust if you know who wrote it")
    model = rebuilt(facts)
    model.load_state_dict(tensors)
    return _by_torch(model), facts


def _open_pt2(path: Path, trusted: bool) -> tuple[Run, Facts]:
    if not trusted:
        raise WeftError(f"torch opens {path} with pickle: add --trust if you know who wrote it")
    import torch

    files = {"weft.json": ""}
    with _quiet():
        program = torch.export.load(path, extra_files=files)
    return _by_torch(program.module()), json.loads(files["weft.json"])


def _open_onnx(path: Path, _: bool) -> tuple[Run, Facts]:
    try:
        import onnxruntime
    except ImportError:
        raise WeftError(f"an .onnx file {NEEDS}") from None
    try:
        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors share no class but this one
        raise ValueError(error_line(error)) from None
    facts = json.loads(session.get_modelmeta().custom_metadata_map["weft"])
    (given,) = [each.name for each in session.get_inputs()]

    def run(images: Images) -> Answers:
        logits, answer = session.run(None, {given: images})
        return logits, answer

    return run, facts


def _by_torch(model: Callable[..., Any]) -> Run:
    import torch

    def run(images: Images) -> Answers:
        with torch.no_grad():
            logits, answer = model(torch.from_numpy(images))
        return logits.numpy(), answer.numpy()

    return run


OPEN: dict[str, Callable[[Path, bool], tuple[Run, Facts]]] = {
    "safetensors": _open_safetensors,
    "onnx": _open_onnx,
    "pt2": _open_pt2,
}
