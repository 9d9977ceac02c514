"""The generated part of the README; ``python tests/readme.py`` writes it."""

import re
from pathlib import Path

from manyclass import samplers

README = Path(__file__).parent.parent / "README.md"
TABLE = re.compile(r"(<!-- samplers: [^\n]* -->\n).*?(<!-- end of samplers -->\n)", re.S)


def with_table(text: str) -> str:
    """Put the table of samplers between its two comments."""
    written, places = TABLE.subn(lambda found: f"{found[1]}\n{samplers.table()}\n{found[2]}", text)
    assert places == 1, f"README.md must have the comments around the table of samplers once, not {places} times"
    return written


if __name__ == "__main__":
    README.write_text(with_table(README.read_text("utf-8")), "utf-8")
