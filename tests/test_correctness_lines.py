"""The numbered mistakes of earlier systems each have tests that carry their number."""

import ast
import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
LINES = {
    1: "the ids that were sampled are the ids that are trained",
    2: "a turn stops at the first closing tag, and keeps every sampled token",
    3: "only policy tokens are learned from, by origin and not by id",
    4: "GAE crosses an observation in one step",
    5: "the trained context is the rollout's context",
    6: "observations are trimmed before they are wrapped",
    7: "injected text is never an action",
    8: "the answer is read from the policy's response only",
    9: "scores are those of SQuAD and of the papers, by hand",
    10: "format rewards accept what chat templates really write",
    11: "groups are prompt instances, and keep their n members",
    12: "every request has a seed of its own",
    13: "validation is greedy on every turn, whole and repeatable",
    14: "one log-prob pass, one weight update a step, no cache of old weights",
    15: "N steps are N updates; N turns are N searches and a last turn",
    16: "over-long prompts are counted or refused before training",
    17: "an update that is not finite is skipped, counted and named",
    18: "the retriever answers every form, and concurrent clients as serial ones",
    19: "a search that fails is an infrastructure failure, never an observation",
    20: "a reranker pairs each query with its own documents; one wire contract",
    21: "a run that was killed goes on as one that was not",
    22: "without staleness a run is the synchronous one; what is left out is counted and bounded",
    23: "each token has the version and log-prob that sampled it, and the loss reads those",
    24: "a resumed run skips no row and repeats none",
    25: "a dialogue rendered as a whole has the ids that were sampled turn by turn",
    26: "a failed tool or reward is a failure with a name, never a score",
    27: "collectives have a device that their process group serves",
    28: "the packed forward pass is the model's own",
    29: "the engine samples with the weights that are trained",
    30: "a prompt has one BOS, also where its text was rendered before",
    31: "a list or object saved as text is read or refused, never an answer",
    32: "no text from outside makes a control token",
}


def numbered_tests() -> Counter[int]:
    """Return the number of tests of each line, by their names `test_line_NN_…` (two digits)."""
    names = [
        node.name
        for path in sorted(TESTS.rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    found = (re.match(r"test_line_(\d\d)_", name) for name in names)
    return Counter(int(match[1]) for match in found if match)


def test_every_line_has_a_test_of_its_number() -> None:
    """Each line has a test, and no test carries a number without a line."""
    assert sorted(numbered_tests()) == sorted(LINES)
