"""The page `docs/models.md`, from the outcomes of `tests.hf_sweep`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import transformers

_HEAD = """\
# Models

What becomes of the classes of transformers {transformers} with torch {torch}: every `*ForCausalLM`,
`*ForSequenceClassification`, `*ForImageClassification` and encoder-decoder class that its `Auto*`
classes list, {listed} in all. The page is written by

```
python -m tests.hf_sweep --json outcomes.jsonl --write docs/models.md
```

which takes hours on one core. Outcomes are those of the code that ran them, and the table was
filled while it still changed: delete the file of outcomes to run all of them again. `--json` keeps
each outcome as soon as it is there, and a second run goes on where the first one stopped;
`--only REGEX` takes some classes, `--again STATUS` runs those of one outcome again.
`pytest -m slow tests/test_hf_sweep.py` fails if any class is wrong.

A configuration is made tiny by the names of its fields: one layer (or one of each kind), width 64,
no dropout. The unmodified module is then traced with its backward pass and planned twice for two
ranks: with `data=2`, and freely with 60% of the memory that one device needs (or the least for
which a plan is found). Both plans run on virtual ranks in one process and are compared with the
eager module: outputs, every gradient and every buffer.

- **exact**: the largest relative error ‖parallel − eager‖ / ‖eager‖ of any tensor is at most
  {bound64:g} in float64. The sweep runs the casts to float32 in a model's code as casts to float64;
  a class that computes in float32 all the same (its kernel has no float64) is held to {bound32:g}.
  Where only `data` is named, the free plan was not found within the time of the class.
- **refused**: autopar says why it cannot plan the model, with the line of the model's code.
- **wrong**: the numbers differ, or an error that autopar did not foresee.
- **not run**: not finished within {cpu} s of one core, or the sweep ended before its turn. Nothing
  is known of these.
- **not built**: no tiny configuration builds and runs eagerly within {build:.0f} s, or a package
  is missing. autopar has not seen these.

{counts}
"""
_STATUSES = ("exact", "refused", "wrong", "not run", "not built")
_KINDS = ("ForCausalLM", "ForSequenceClassification", "ForImageClassification")
_REST = "encoder-decoders and other language models"


def _kind(name: str) -> str:
    return next((f"`*{kind}`" for kind in _KINDS if name.endswith(kind)), _REST)


def _counts(outcomes: Sequence[Any], missing: Collection[str]) -> str:
    """Classes of each kind by status."""
    pairs = [*((_kind(o.name), o.status) for o in outcomes)]
    count = Counter([*pairs, *((_kind(name), "not run") for name in missing)])
    rows = {
        kind: [count[kind, status] for status in _STATUSES]
        for kind in (*(f"`*{kind}`" for kind in _KINDS), _REST)
    }
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    return "\n".join(
        [
            f"| kind | {' | '.join(_STATUSES)} |",
            f"| --- |{' ---: |' * len(_STATUSES)}",
            *(f"| {kind} | {' | '.join(map(str, row))} |" for kind, row in rows.items()),
        ]
    )


def table(
    outcomes: Sequence[Any],
    *,
    listed: Collection[str],
    bounds: tuple[float, float],
    build_seconds: float,
    cpu_seconds: float,
) -> str:
    """The page as Markdown.

    Args:
        outcomes: of `tests.hf_sweep`.
        listed: the names of all the classes, also those that have no outcome.
        bounds: largest relative error in float64, and in float32.
        build_seconds, cpu_seconds: the limits of the sweep.
    """
    missing = sorted(set(listed) - {o.name for o in outcomes})
    page = _HEAD.format(
        transformers=transformers.__version__,
        torch=torch.__version__.split("+")[0],
        listed=len(listed),
        bound64=bounds[0],
        bound32=bounds[1],
        build=build_seconds,
        cpu=cpu_seconds,
        counts=_counts(outcomes, missing),
    )
    sections: tuple[tuple[str, Callable[[Sequence[Any]], str]], ...] = (
        ("wrong", _reasons),
        ("refused", _reasons),
        ("exact", _errors),
        ("not run", _reasons),
        ("not built", _reasons),
    )
    for status, section in sections:
        chosen = sorted((o for o in outcomes if o.status == status), key=lambda o: str(o.name))
        if chosen:
            page += f"\n## {status.capitalize()}\n\n" + section(chosen)
    if missing:
        page += f"\n## Not reached\n\nThe sweep ended before these {len(missing)}:\n\n"
        page += ", ".join(missing) + ".\n"
    return page + _no_rule(outcomes)


def _plain(text: str) -> str:
    """One cell: no bars, no advice on installing, no path to where the packages happen to lie."""
    text = re.sub(r"[^\s(]*/site-packages/", "", text)
    text = re.sub(r"(was not found) in your environment.*", r"\1", text)
    return text.replace("|", "\\|").strip()


def _errors(outcomes: Sequence[Any]) -> str:
    lines = ["| class | plans | largest relative error | bound |", "| --- | --- | ---: | ---: |"]
    lines += [
        f"| {o.name} | {', '.join(o.plans)} | {o.error:.1e} | {o.bound:g} |" for o in outcomes
    ]
    return "\n".join(lines) + "\n"


def _reasons(outcomes: Sequence[Any]) -> str:
    lines = ["| class | reason |", "| --- | --- |"]
    lines += [f"| {o.name} | {_plain(o.detail)} |" for o in outcomes]
    return "\n".join(lines) + "\n"


def _no_rule(outcomes: Sequence[Any]) -> str:
    """Which ops ran replicated for want of a rule, and in how many classes."""
    ops = Counter(op for o in outcomes for op in o.no_rule)
    if not ops:
        return "\n## Ops without a sharding rule\n\nNone.\n"
    lines = ["| op | classes |", "| --- | ---: |"]
    lines += [f"| `{op}` | {count} |" for op, count in ops.most_common()]
    return (
        "\n## Ops without a sharding rule\n\nThey run replicated, which is right but not fast.\n\n"
        + "\n".join(lines)
        + "\n"
    )
