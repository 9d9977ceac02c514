"""Test the installed wheel where no compiler can be found; `make test-wheel` runs this."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import manyclass

TESTS = Path(__file__).parent
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja")
TEXT = "the cat sat on the mat and the dog sat on the log .\n" * 200


def main() -> None:
    """Check that the native core came with the wheel, then run the tests that reach it and a short training."""
    compilers = [name for name in COMPILERS if shutil.which(name)]
    assert not compilers, f"a compiler is in reach: {compilers}"
    package = Path(manyclass.__file__).parent
    assert package.is_relative_to(sys.prefix), f"manyclass is not the installed one: {package}"
    assert manyclass.native_available(), "the wheel has no native core"
    files = [TESTS / "test_native.py", TESTS / "test_fused.py"]
    subprocess.run([sys.executable, "-m", "pytest", *files], check=True, cwd=TESTS.parent)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(TEXT, "utf-8")
        program = Path(sys.executable).with_name("manyclass")
        for words in (["train", "lm", "--text", text, "--steps", "20", "--out", "run"], ["predict", "run", "the cat"]):
            subprocess.run([program, *words], check=True, cwd=folder)
    print(f"the wheel works: {package}")


if __name__ == "__main__":
    main()
