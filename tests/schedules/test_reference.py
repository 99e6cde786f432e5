"""Op for op what Megatron, torch, JaxPP, the zero-bubble authors and DeepSeek run, at 4 ranks and 8
microbatches.

The files are recorded from those programs; the first line of each says how.
"""

import re
from pathlib import Path

import pytest

from jaxpipe.schedules import Costs, Schedule, build, check, parse, peak_activations, simulate
from jaxpipe.schedules.analysis import parallelogram_bubble, rectangular_bubble

REFERENCE = Path(__file__).parent / "reference"

FILES = {
    "dualpipe": ("dualpipe", {}),
    "dualpipev": ("dualpipev", {}),
    "eager_1f1b": ("eager_1f1b", {}),
    "gpipe": ("gpipe", {}),
    "grouped_interleaved_g2": ("grouped_interleaved", {"group": 2}),
    "interleaved_1f1b_v2": ("interleaved_1f1b", {}),
    "interleaved_1f1b_v3": ("interleaved_1f1b", {"chunks": 3}),
    "interleaved_zero_bubble_v2": ("interleaved_zero_bubble", {}),
    "kimi_k2_v2": ("kimi_k2", {}),
    "looped_bfs_v2": ("looped_bfs", {}),
    "one_f_one_b": ("1f1b", {}),
    "seq1f1b_s2": ("seq1f1b", {}),
    "v_half": ("v_half", {}),
    "v_min": ("v_min", {}),
    "zbv": ("zbv", {}),
    "zero_bubble_h1": ("zero_bubble_h1", {}),
    "zero_bubble_h2": ("zero_bubble_h2", {"spare": 1}),
}


def reference(name: str) -> Schedule:
    """Reads a file. Three things are spelt otherwise there.

    JaxPP's `(a;b)FUSED` is a matter of its dispatch, in which `a` comes first. DualPipe's streams
    are microbatches a0 to a3 and b0 to b3: ours are 0 to 3 and 4 to 7.
    """
    text = "\n".join(
        line for line in (REFERENCE / f"{name}.csv").read_text().splitlines() if line[0] != "#"
    )
    text = re.sub(r"\(([^;]*);([^;]*)\)FUSED", r"\1,\2", text)
    text = re.sub(r"([FBIW])a(\d)", r"\1\2", text)
    text = re.sub(r"([FBIW])b(\d)", lambda match: f"{match[1]}{4 + int(match[2])}", text)
    return parse(re.sub(",+", " ", text))


def test_every_file_is_compared():
    assert set(FILES) == {path.stem for path in REFERENCE.glob("*.csv")}


@pytest.mark.parametrize("file", FILES)
def test_our_list_is_the_reference_list(file: str):
    name, options = FILES[file]
    assert str(build(name, ranks=4, microbatches=8, **options)) == str(reference(file))


@pytest.mark.parametrize("file", FILES)
def test_the_reference_list_checks(file: str):
    check(reference(file))


def test_zero_bubble_h2_has_the_bubble_of_its_reference_and_one_microbatch_less_alive():
    # The authors' program was asked for twice 1F1B's memory, 2p; the paper's H2 needs 2p - 1. With
    # `spare` 1 the lists are equal. Without it only the W's and the last F of a rank change places.
    ours, theirs = build("zero_bubble_h2", ranks=4, microbatches=8), reference("zero_bubble_h2")
    for measure in (rectangular_bubble, parallelogram_bubble):
        assert measure(simulate(ours, Costs())) == measure(simulate(theirs, Costs()))
    assert peak_activations(ours) == (7, 7, 7, 7)
    assert peak_activations(theirs) == (8, 8, 8, 8)
