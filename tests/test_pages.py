"""Large tables lie in huge pages, where the kernel has them, and processes of the command line keep their memory."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from manyclass import SampledSoftmax, optim, pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Linux from 6.1 on moves memory that is in use already.
MOVES = sys.platform == "linux" and tuple(map(int, platform.release().split(".")[:2])) >= (6, 1)


def huge_kilobytes(address: int) -> int:
    """Read how much of the mapping that holds an address is in huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "AnonHugePages:":
            return int(line.split()[1])
    return 0


@pytest.mark.skipif(not MOVES, reason="memory moves into huge pages on Linux 6.1 and later only")
@pytest.mark.skipif(not SETTING.exists() or "[never]" in SETTING.read_text(), reason="this kernel has no huge pages")
def test_large_tables_are_in_huge_pages():
    table = torch.randn(1 << 23)  # 32 MB, in use already
    before = table.clone()
    middle = table.data_ptr() + table.nbytes // 2
    pages.use_huge_pages(table)
    assert huge_kilobytes(middle) >= 2048, "not even one page"
    assert torch.equal(table, before)


def test_a_layer_and_its_optimiser_ask_once(monkeypatch):
    asked = []
    monkeypatch.setattr("manyclass.refresh.use_huge_pages", lambda *tensors: asked.append(len(tensors)))
    monkeypatch.setattr("manyclass.optim.base.use_huge_pages", lambda *tensors: asked.append(len(tensors)))
    for sampler in ("blocks", "uniform"):
        asked.clear()
        head = SampledSoftmax(8, 500, sampler, 16)
        optimizer = optim.AdamW(head.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            head(torch.randn(4, 8), torch.randint(500, (4,))).backward()
            optimizer.step()
        assert asked == [1 + len(list(head.sampler.buffers())), 2]


def test_small_tables_and_other_devices_are_left_alone(monkeypatch):
    called = []
    monkeypatch.setattr(pages, "_madvise", lambda *arguments: called.append(arguments))
    pages.use_huge_pages(None, torch.zeros(1000), torch.zeros(1 << 23, device="meta"))
    assert not called
    pages.use_huge_pages(torch.zeros(1 << 23))
    assert len(called) == 2


FAULTS = """
import resource, sys, torch
from manyclass.cli import console
if sys.argv[1] == "start":
    console.start(1)
torch.ones(1 << 24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_commands_keep_their_memory():
    """At most two of ten tensors, of 16,384 pages each, need new pages: the first ones leave holes for alignment."""

    def faults(how: str) -> int:
        command = [sys.executable, "-c", FAULTS, how]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert faults("not") > 10 * 16_000
    assert faults("start") < 2 * 17_000
