"""The generated tables of the docs; ``python tests/readme.py`` writes them."""

import re
from pathlib import Path

from manyclass import samplers
from manyclass.experiments import comparison, comparison_report

DOCS = Path(__file__).parent.parent / "docs"
PAGE, RELATED, RESULTS = DOCS / "samplers.md", DOCS / "related-work.md", DOCS / "results"


def with_table(text: str, name: str = "samplers", table: str | None = None) -> str:
    """Put a table between its two comments: that of all samplers, if no other is given."""
    place = re.compile(rf"(<!-- {name}: [^\n]* -->\n).*?(<!-- end of {name} -->\n)", re.S)
    # Links in the samplers' descriptions start at the root.
    content = samplers.table().replace("](docs/", "](") if table is None else table
    written, places = place.subn(lambda found: f"{found[1]}\n{content}\n{found[2]}", text)
    assert places == 1, f"there must be comments around the table of {name} once, not {places} times"
    return written


def comparison_groups() -> dict[str, list[comparison.Result]]:
    """Read the committed results of `manyclass compare`."""
    return comparison_report.grouped("quick", comparison.DATASETS, RESULTS)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
    groups = comparison_groups()
    overview = comparison_report.overview(groups)
    RELATED.write_text(with_table(RELATED.read_text("utf-8"), "comparison", overview), "utf-8")
    (RESULTS / comparison_report.PAGE).write_text(comparison_report.page(groups), "utf-8")
    comparison_report.plot(groups, RESULTS / comparison_report.PLOT)
