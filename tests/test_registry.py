"""Classes and functions by name: found in modules and files, named again, and the errors."""

import functools
import subprocess
import sys

import pytest

from weft import errors, registry
from weft.errors import WeftError


class Here:
    class Inner:
        pass


def write(folder, text, name="thing.py"):
    file = folder / name
    file.write_text(text)
    return file


# ---- finding


def test_in_a_file(tmp_path, monkeypatch):
    file = write(tmp_path, "class Thing:\n    class Inner:\n        number = 7\n")
    found = registry.find(f"{file}:Thing")
    assert found.Inner.number == 7
    assert registry.find(f"{file}:Thing.Inner") is found.Inner
    monkeypatch.chdir(tmp_path)
    assert registry.find("thing.py:Thing") is found  # the same file by another path
    assert registry.find(f"../{tmp_path.name}/thing.py:Thing") is found


def test_a_file_is_loaded_once(tmp_path):
    notes = tmp_path / "notes"
    text = f"with open({str(notes)!r}, 'a') as file:\n    file.write('x')\nclass A: ...\nclass B: ...\n"
    file = write(tmp_path, text)
    for name in ("A", "B", "A"):
        registry.find(f"{file}:{name}")
    assert notes.read_text() == "x"


def test_two_files_of_one_name_are_two(tmp_path):
    files = []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        files.append(write(tmp_path / str(number), f"class Thing:\n    number = {number}\n"))
    assert [registry.find(f"{file}:Thing").number for file in files] == [1, 2]


def test_a_file_sees_what_lies_beside_it(tmp_path):
    write(tmp_path, "value = 5", "beside_the_thing.py")
    file = write(tmp_path, "import beside_the_thing\ndef value():\n    return beside_the_thing.value\n")
    assert registry.find(f"{file}:value")() == 5


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("class Thing: ...", "Thin", "has no Thin; did you mean Thing?"),
        ("class Thing: ...", "Thing.Inner", "has no Thing.Inner"),
        ("import json", "json2", "has no json2, and defines nothing else"),
        ("1 / 0", "Thing", "cannot be loaded: ZeroDivisionError: division by zero"),
        ("class :", "Thing", "cannot be loaded: SyntaxError"),
        ("import sys\nsys.exit(3)", "Thing", "cannot be loaded: SystemExit: 3"),
        ("import no_such_package", "Thing", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise ValueError('one\\ntwo')", "Thing", "cannot be loaded: ValueError: one"),
        ("raise ValueError", "Thing", "cannot be loaded: ValueError"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path, text, name, said):
    file = write(tmp_path, text)
    for _ in range(2):  # a file that failed is not taken for loaded
        with pytest.raises(WeftError) as caught:
            registry.find(f"{file}:{name}")
        assert str(caught.value).startswith(f"{file} {said}")
        assert "\n" not in str(caught.value)


def test_a_file_that_failed_can_be_mended(tmp_path):
    file = write(tmp_path, "1 / 0")
    with pytest.raises(WeftError):
        registry.find(f"{file}:Thing")
    file.write_text("class Thing: ...  # mended")
    assert registry.find(f"{file}:Thing").__name__ == "Thing"


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("no/such/file.py:Thing", "there is no file /"),
        ("no_such_module:Thing", "there is no module no_such_module on Python's path; install it, or name its file"),
        ("weft.no_such:Thing", "there is no module weft.no_such on Python's path"),
        ("weft.errors:WeftErorr", "weft.errors has no WeftErorr; did you mean WeftError?"),
        ("thing.py", "'thing.py' is not a reference; write package.module:Name or path/to/file.py:Name"),
        (":Thing", "':Thing' is not a reference"),
        ("thing.py:", "'thing.py:' is not a reference"),
    ],
)
def test_what_cannot_be_found(reference, said):
    with pytest.raises(WeftError) as caught:
        registry.find(reference)
    assert str(caught.value).startswith(said)


def test_a_module_that_fails(tmp_path, monkeypatch):
    write(tmp_path, "import no_such_package", "needs_another.py")
    write(tmp_path, "1 / 0", "divides.py")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WeftError, match=r"needs_another cannot be loaded: ModuleNotFoundError: .*no_such_package"):
        registry.find("needs_another:Thing")
    with pytest.raises(WeftError, match="divides cannot be loaded: ZeroDivisionError: division by zero"):
        registry.find("divides:Thing")


# ---- naming


def test_there_and_back(tmp_path):
    for thing in (errors.WeftError, errors.nearest, Here, Here.Inner):
        assert registry.find(registry.reference(thing)) is thing
    assert registry.reference(Here.Inner) == f"{__name__}:Here.Inner"
    file = write(tmp_path, "class Thing: ...")
    found = registry.find(f"{file}:Thing")
    assert registry.reference(found) == f"{file.resolve()}:Thing"  # no other process knows its private name


def local():
    class Local:
        pass

    return Local


@pytest.mark.parametrize("thing", [lambda: None, local(), functools.partial(local), Here(), 5], ids=type)
def test_what_cannot_be_named(thing):
    with pytest.raises(WeftError, match=r"define it .*at the top of a module"):
        registry.reference(thing)


def test_a_name_that_means_something_else(monkeypatch):
    old = Here
    monkeypatch.setattr(sys.modules[__name__], "Here", type("Here", (), {}))
    with pytest.raises(WeftError, match="different object; define it"):
        registry.reference(old)


SCRIPT = """
from weft import registry

class Thing: ...

def work():
    print(registry.reference(Thing))
    print(registry.find(registry.reference(Thing)) is Thing)

{start}
"""


def script(file, *more):
    done = subprocess.run([sys.executable, str(file), *more], capture_output=True, text=True)
    return done.stdout.splitlines(), done.stderr


def test_in_a_script(tmp_path):
    """A script's own classes are named by its file, and are there already."""
    file = write(tmp_path, SCRIPT.format(start="work()"))
    assert script(file) == ([f"{file.resolve()}:Thing", "True"], "")


def test_a_script_is_loaded_by_another_process(tmp_path):
    guarded = write(tmp_path, SCRIPT.format(start='if __name__ == "__main__":\n    work()'), "guarded.py")
    assert registry.find(f"{guarded}:Thing").__name__ == "Thing"
    careless = write(tmp_path, SCRIPT.format(start="work()"), "careless.py")
    with pytest.raises(WeftError, match=r'careless.py runs itself .* put that code under if __name__ == "__main__":'):
        registry.find(f"{careless}:Thing")


def test_typed_in():
    text = "from weft import registry\nclass Thing: ...\nregistry.reference(Thing)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith("move it to a file, so that other processes can import it")


def test_an_option_cannot_be_called_name():
    """In a plan it is the name of the network or scenario."""

    def network(name: str = "x") -> None: ...

    with pytest.raises(WeftError, match=r"'name' .* rename it"):
        registry.options_from(network)
