"""Write and open the files of an exported model. Both formats keep JSON metadata under the key "weft".

onnx          a graph for onnxruntime and other software that reads ONNX
safetensors   the tensors by name; the reader provides the network
"""

from __future__ import annotations

import contextlib
import json
import logging
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from weft.errors import WeftError
from weft.lazy import torch
from weft.registry import error_line

if TYPE_CHECKING:
    from weft.runs.model import ExportedTask, Metadata, TaskModel

Format = Literal["safetensors", "onnx"]
FORMATS: tuple[Format, ...] = ("safetensors", "onnx")
TOLERANCE = 1e-3  # of logits; a different order of summation gives about a thousandth of it
MISSING = "needs onnx, onnxscript and onnxruntime: pip install 'weft[export]'"

Images = NDArray[np.uint8]  # (batch, height, width, 3)
Outputs = tuple[NDArray[np.float32], NDArray[np.float32]]  # logits and predictions
Predict = Callable[[Images], Outputs]


def write(exported: ExportedTask, path: Path, kind: Format) -> float:
    """Write the file, open it again and compare it with the run; return the largest difference of a logit.

    The file exists complete and checked, or not at all.
    """
    if not path.parent.is_dir():
        raise WeftError(f"{path} cannot be written: there is no folder {path.parent}; choose another --out")
    partial = path.with_name(f".{path.name}.part.{kind}")
    try:
        (_write_onnx if kind == "onnx" else _write_safetensors)(exported.model, exported.metadata, partial)
        predict, _ = open_model(partial, kind, trusted=True)
        logits, _ = predict(exported.images.numpy())
        expected = exported.logits.numpy()
        difference = float(np.abs(logits - expected).max())
        if not difference <= TOLERANCE * max(1.0, float(np.abs(expected).max())):
            raise WeftError(f"the exported model differs from the run (logits by {difference:.3g}) and is not kept")
        partial.replace(path)
    except OSError as error:
        raise WeftError(f"{path} cannot be written ({error.strerror or error}); choose another --out") from None
    finally:
        partial.unlink(missing_ok=True)
    return difference


def _write_safetensors(model: TaskModel, metadata: Metadata, path: Path) -> None:
    import safetensors.torch

    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(tensors, path, metadata={"weft": json.dumps(metadata)})


def _write_onnx(model: TaskModel, metadata: Metadata, path: Path) -> None:
    try:
        import onnxruntime  # noqa: F401 - the file is checked with it
        import onnxscript  # noqa: F401 - torch.onnx is written in it
    except ImportError:
        raise WeftError(f"--format onnx {MISSING}; --format safetensors needs nothing more") from None
    with _no_warnings():
        program, batch = _trace(model, metadata)
        names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits", metadata["predictions"]]}
        try:
            graph = torch.onnx.export(program, dynamo=True, verbose=False, **names)
        except Exception as error:
            raise WeftError(
                f"the network {metadata['network']} cannot be written as ONNX: {error_line(error)}"
            ) from error
        assert graph is not None
        # a graph is complete: it names no code, and so no path of the machine on which it was made
        public = {key: value for key, value in metadata.items() if key not in ("network", "network_options", "loss")}
        graph.model.metadata_props["weft"] = json.dumps({**public, "batch": batch})
        graph.save(str(path))


def _trace(model: TaskModel, metadata: Metadata) -> tuple[Any, str | int]:
    """The model traced by torch for a batch of any size, or of one image if its code uses the size (`len(x)`)."""
    dynamic: tuple[Any, ...] = ({0: torch.export.Dim("batch")},)
    cause = None
    for batch, shapes in (("any", dynamic), (1, None)):
        example = torch.zeros((2 if batch == "any" else 1, *metadata["image"]), dtype=torch.uint8)
        try:
            return torch.export.export(model, (example,), dynamic_shapes=shapes, strict=False), batch
        except Exception as error:
            cause = error
    assert cause is not None
    raise WeftError(f"the network {metadata['network']} cannot be exported by torch: {error_line(cause)}") from cause


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """Silence torch's exporter, which warns of its future versions and of packages that are not needed here."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def open_model(path: Path, kind: str | None = None, trusted: bool = False) -> tuple[Predict, Metadata]:
    """A function from images to logits and predictions, and the metadata; the format is the suffix unless given.

    Only a trusted file may name code that is run: a user-defined network or loss.
    """
    kind = kind or path.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise WeftError(f"{path} has none of the suffixes .safetensors and .onnx; name a file that weft export wrote")
    if not path.is_file():
        raise WeftError(f"there is no file {path}; weft export writes one")
    try:
        return _open_onnx(path) if kind == "onnx" else _open_safetensors(path, trusted)
    except WeftError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, struct.error) as error:
        raise WeftError(f"{path} is not a model that weft export wrote: {error_line(error)}") from None


def _open_safetensors(path: Path, trusted: bool) -> tuple[Predict, Metadata]:
    import safetensors.torch

    from weft.runs.model import rebuild

    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})["weft"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from None
    code = [str(metadata[key]) for key in ("network", "loss") if ":" in str(metadata[key])]
    if code and not trusted:
        raise WeftError(f"{path} names code to run ({', '.join(code)}): add --trust if you trust its author")
    model = rebuild(metadata)
    model.load_state_dict(tensors)

    def predict(images: Images) -> Outputs:
        with torch.no_grad():
            logits, predictions = model(torch.from_numpy(images))
        return logits.numpy(), predictions.numpy()

    return predict, metadata


def _open_onnx(path: Path) -> tuple[Predict, Metadata]:
    try:
        import onnxruntime
    except ImportError:
        raise WeftError(f"an .onnx file {MISSING}") from None
    try:
        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no other common class
        raise ValueError(error_line(error)) from None
    metadata = json.loads(session.get_modelmeta().custom_metadata_map["weft"])
    (name,) = [each.name for each in session.get_inputs()]

    def predict(images: Images) -> Outputs:
        size = 1 if metadata.get("batch") == 1 else len(images)
        outputs = [session.run(None, {name: images[start : start + size]}) for start in range(0, len(images), size)]
        return np.concatenate([logits for logits, _ in outputs]), np.concatenate([last for _, last in outputs])

    return predict, metadata
