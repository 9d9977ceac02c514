"""The package installs without a compiler, and then says that the reference serves."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

USE = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, manyclass
    head = manyclass.SampledSoftmax(4, 9, "unigram", 3, counts=torch.arange(9))
    head(torch.ones(2, 4), torch.tensor([1, 2])).backward()
messages = [str(w.message) for w in caught if "native core" in str(w.message)]
print(manyclass.__path__[0], manyclass.native_available(), len(messages))
"""


@pytest.mark.skipif(not (ROOT / "CMakeLists.txt").exists(), reason="needs the source tree")
def test_install_without_a_compiler(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "dist", "out"))
    environment = {**os.environ, "CXX": "/nonexistent", "PATH": str(Path(sys.executable).parent)}
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    built = subprocess.run([*pip, tmp_path, source], env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    assert not list((tmp_path / "site").rglob("_native*"))
    # -S keeps the hook of the development install away; torch comes by path.
    paths = [str(tmp_path / "site"), sysconfig.get_paths()["purelib"]]
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {paths!r}\n{USE}"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(tmp_path / "site" / "manyclass"), "False", "1"]
