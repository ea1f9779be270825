"""The `autopar` command, in process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch  # (its log handlers must not bind to the stderr of one test)

from autopar.cli import main
from autopar.cli.arguments import pin
from autopar.codegen.fusion import Fusion
from autopar.core.plan import Plan
from autopar.cost_model.catalogue import profile_names
from autopar.errors import AutoparError

MODELS = """
import torch
import transformers as hf
from torch import nn

def gpt2(layers=2, width=64):
    config = hf.GPT2Config(
        n_layer=layers, n_embd=width, n_head=8, vocab_size=128, n_positions=32,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    return hf.GPT2LMHeadModel(config)

def vit():
    config = hf.ViTConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=4,
        image_size=16, patch_size=8, num_labels=8)
    return hf.ViTForImageClassification(config)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 32)

    def forward(self, x):
        return self.linear(x).square().mean()

def with_inputs():
    return Net(), {"x": torch.randn(8, 64)}

def without_inputs():
    return Net()

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()

def deep():
    return Deep(), {"x": torch.randn(64, 64)}

def number():
    return 3

def reads_values():
    return nn.Linear(int(torch.ones(1).item()), 2)

def broken():
    raise KeyError("a defect of the user's")

class Branch(Net):
    def forward(self, input_ids):
        return self.linear.weight.sum() if input_ids.sum() > 0 else input_ids

constant = 3
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with `cli_models.py`; it is the current directory."""
    (tmp_path / "cli_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "cli_models", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def plan_args(factory: str, *more: str, cluster: str = "h100-sxm") -> list[str]:
    model = ["--model", f"cli_models:{factory}"]
    return ["plan", *model, "--cluster", cluster, "--devices-per-node", "4", *more]


TOKENS = ("--batch-size", "4", "--seq-len", "16")


def failing(argv: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """The message of a command that fails: one paragraph, no traceback."""
    assert main(argv) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    message = captured.err.strip().splitlines()[-1]
    assert message.startswith("autopar: ")
    assert "Traceback" not in captured.err
    return message


def test_plan_then_show(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pins = project / "pins.json"
    pins.write_text('{"data": 2, "tensor": "1d"}')
    more = ("--mesh", "2x2", "--constraints", str(pins), "--dtype", "bf16", "--out", "plan.json")
    arguments = ("--factory-args", '{"layers": 3}', "--optimizer", "sgd")
    assert main(plan_args("gpt2", *TOKENS, *more, *arguments)) == 0
    printed = capsys.readouterr().out
    assert "transformer.h.[0-2]" in printed
    assert "tensor=" in printed and "1d" in printed
    saved = Plan.load("plan.json")
    assert saved.mesh_shape == (2, 2)
    assert saved.constraints == {"tensor": {"mode": "1d"}, "data": 2}
    assert saved.optimizer == "sgd"
    assert main(["show", "plan.json"]) == 0
    shown = capsys.readouterr().out
    assert printed == shown + "\nsaved to plan.json\n"
    assert main(["show", "plan.json", "--width", "60"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_dtype_halves_the_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for dtype in ("fp32", "bf16"):
        assert main(plan_args("with_inputs", "--dtype", dtype, "--out", "plan.json")) == 0
        sizes.append(Plan.load("plan.json").predicted.memory["parameters"])
    assert sizes[0] == 2 * sizes[1] == (64 * 32 + 32) * 4
    assert "linear.weight" in capsys.readouterr().out


def test_factory_with_inputs_ignores_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(plan_args("with_inputs", *TOKENS)) == 0
    captured = capsys.readouterr()
    assert "ignored" in captured.err
    assert "saved" not in captured.out


def test_image_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(plan_args("vit", "--batch-size", "8")) == 0
    assert "pixel_values" in capsys.readouterr().out


def test_infeasible_memory_limit(capsys: pytest.CaptureFixture[str]) -> None:
    message = failing(plan_args("deep", "--memory-limit", "1KiB"), capsys)
    assert "no plan fits" in message
    assert "smallest limit" in message
    assert "bytes" in message


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("cli_models", "write module:factory"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("cli_models:gpt", "Did you mean 'gpt2'?"),
        ("cli_models:constant", "not a callable"),
        ("cli_models:number", "must return an nn.Module"),
        ("cli_models:reads_values", "meta device"),
        ("cli_models:without_inputs", "return (module, example_inputs)"),
        ("cli_models:Branch", "cannot trace Branch"),
    ],
)
def test_bad_models(model: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--model", model, "--cluster", "h100-sxm", *TOKENS]
    assert expected in failing(argv, capsys)


@pytest.mark.parametrize("given", ['{"layer": 3}', "[1, 2, 3, 4, 5]"])
def test_arguments_that_a_factory_does_not_take(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = failing(plan_args("gpt2", *TOKENS, "--factory-args", given), capsys)
    assert "cli_models:gpt2(" in message and "--factory-args" in message


def test_sizes_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--batch-size" in failing(plan_args("gpt2"), capsys)
    assert "--seq-len" in failing(plan_args("gpt2", "--batch-size", "4"), capsys)


def test_trace_error_tells_the_made_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    message = failing(plan_args("Branch", *TOKENS), capsys)
    assert "input_ids [4, 16]" in message
    assert "return (module, example_inputs)" in message


def test_bad_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    message = failing(plan_args("gpt2", *TOKENS, cluster="h100-sxn"), capsys)
    assert "Did you mean 'h100-sxm'?" in message
    assert "whose product is 4" in failing(plan_args("gpt2", *TOKENS, "--mesh", "3x2"), capsys)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"tensr": "1d"}', "'tensor'"),
        ("{", "not JSON"),
        ("no_such_file.json", "neither a JSON object nor a readable file"),
    ],
)
def test_bad_constraints(text: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = plan_args("with_inputs", "--constraints", text)
    assert expected in failing(argv, capsys)


def test_missing_folder_is_told_first(capsys: pytest.CaptureFixture[str]) -> None:
    message = failing(plan_args("broken", *TOKENS, "--out", "none/plan.json"), capsys)
    assert "does not exist" in message


def test_bad_plan_files(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = project / "plan.json"
    path.write_text("{")
    assert "cut short" in failing(["show", str(path)], capsys)
    path.write_text(json.dumps({"version": 99}))
    assert "version 99" in failing(["show", str(path)], capsys)
    assert "none.json" in failing(["show", "none.json"], capsys, code=1)


def test_defects_keep_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(plan_args("broken", *TOKENS)) == 1
    assert "a defect of the user's" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["plan"],
        plan_args("gpt2", "--memory-limit", "16 gibs"),
        plan_args("gpt2", "--mesh", "4x"),
        plan_args("gpt2", "--nodes", "0"),
        plan_args("gpt2", "--factory-args", "{"),
        plan_args("gpt2", "--dtype", "int4"),
        plan_args("gpt2", "--fusion", "some"),
        plan_args("gpt2", "--fusion", "only"),
        plan_args("gpt2", "--fusion", "off="),
        plan_args("gpt2", "--fusion", "rotary=off"),
    ],
)
def test_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2
    assert "usage: autopar" in capsys.readouterr().err


def test_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profiles"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in profile_names())
    (h200,) = [line for line in out.splitlines() if line.startswith(" h200")]
    assert "139.00 GiB" in h200
    assert "989.4" in h200


def test_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autopar", "profiles"], capture_output=True, text=True, check=True
    )
    assert "h100-sxm" in done.stdout


def test_frontier(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["plan", "--model", "cli_models:deep", "--cluster", "h100-sxm"]
    base += ["--devices-per-node", "2"]
    assert main([*base, "--frontier", "3", "--width", "100", "--plot", "frontier.svg"]) == 0
    picture = ElementTree.parse("frontier.svg")
    rows = [line for line in capsys.readouterr().out.splitlines() if "iB" in line]
    assert 2 <= len(rows) <= 3
    assert "1.000" in rows[0]
    slower = [float(row.split("│")[3]) for row in rows]
    assert slower == sorted(slower) and slower[-1] > 1
    circles = [c.attrib for c in picture.iter("{http://www.w3.org/2000/svg}circle")]
    assert len(circles) == len(rows)  # the slower, the higher and the further left
    for axis, order in (("cx", -1), ("cy", -1)):
        places = [order * float(c[axis]) for c in circles]
        assert places == sorted(set(places))
    assert main([*base, "--plot", "frontier.svg"]) == 2
    assert "--frontier" in capsys.readouterr().err
    assert main([*base, "--frontier", "3", "--out", "plan.json"]) == 2
    assert "--frontier" in capsys.readouterr().err


FUSIONS: list[tuple[list[str], Any]] = [
    ([], None),
    (["on"], True),
    (["off"], False),
    (["off=softmax,generated"], {"off": ["softmax", "generated"]}),
    (["only=layer_norm, bias_act"], {"only": ["layer_norm", "bias_act"]}),
    (["on=linear_nll", "off=token_nll"], {"on": ["linear_nll"], "off": ["token_nll"]}),
    (["on", "off=generated"], {"off": ["generated"]}),
]


@pytest.mark.parametrize(("given", "expected"), FUSIONS)
def test_fusion_is_chosen_by_name(given: list[str], expected: Any) -> None:
    options = [text for each in given for text in ("--fusion", each)]
    assert main(plan_args("gpt2", *TOKENS, *options, "--out", "plan.json")) == 0
    parsed = Fusion.parse(expected, torch.device("cuda"))
    assert set(Plan.load("plan.json").fusion) == parsed.kernels


def test_bad_fusion(capsys: pytest.CaptureFixture[str]) -> None:
    message = failing(plan_args("broken", *TOKENS, "--fusion", "off=rotery"), capsys)
    assert "no fused kernel 'rotery'" in message and "Did you mean 'rotary'?" in message
    both = ["--fusion", "off", "--fusion", "only=rotary"]
    assert "leaves no kernel" in failing(plan_args("broken", *TOKENS, *both), capsys)


def test_fusion_of_a_frontier(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def frontier(*args: Any, **options: Any) -> list[Any]:
        seen.update(options)
        raise AutoparError("enough")

    monkeypatch.setattr("autopar.memory_frontier.frontier", frontier)
    assert main(plan_args("deep", "--frontier", "2", "--fusion", "off")) == 2
    assert seen["fusion"] is False


def test_pins_are_priced_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    pins = ("--pin", "linear.weight=Shard(0),Replicate()", "--mesh", "2x2")
    assert main(plan_args("with_inputs", *pins, "--out", "pinned.json")) == 0
    line, saved = capsys.readouterr().out.splitlines()
    assert saved == "saved to pinned.json"
    plan = Plan.load("pinned.json")
    assert [p.short for p in plan.parameters["linear.weight"]] == ["S0", "R"]
    assert main(plan_args("with_inputs", "--mesh", "2x2", "--out", "free.json")) == 0
    free = Plan.load("free.json").predicted.step_time_s
    assert line.startswith("pin linear.weight=(S0, R): ")
    more = plan.predicted.step_time_s / free - 1
    assert (f"({more:+.2%})" if more else "the same") in line
    capsys.readouterr()
    message = failing(plan_args("with_inputs", "--pin", "nothing*=S0"), capsys)
    assert "matches no parameter" in message
    assert "prints plans" in failing(
        plan_args("with_inputs", "--pin", "linear.weight=R", "--frontier", "2"), capsys
    )


@pytest.mark.parametrize("text", ["linear.weight", "=S0", "linear.weight=Shard", "a=S0,Q"])
def test_a_pin_that_is_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(plan_args("with_inputs", "--pin", text))
    assert "argument --pin" in capsys.readouterr().err


def test_a_pin_with_commas() -> None:
    assert pin("a.*=Shard(1, split=3), Replicate()") == ("a.*", ("S1/3", "R"))
    assert pin("a=S0,R,P") == ("a", ("S0", "R", "P"))


def test_plans_are_read(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """explain, diff, report and trace on one plan."""
    assert main(plan_args("gpt2", *TOKENS, "--out", "a.json")) == 0
    assert main(plan_args("gpt2", *TOKENS, "--constraints", '{"data": 4}', "--out", "b.json")) == 0
    capsys.readouterr()

    assert main(["explain", "b.json", "--param", "transformer.h.0.mlp.c_fc.weight"]) == 0
    out = capsys.readouterr().out
    assert "choice" in out and "--model" in out
    model = ["--model", "cli_models:gpt2", *TOKENS]
    asked = ["explain", "b.json", "--param", "transformer.h.0.mlp.c_fc.weight", *model]
    assert main([*asked, "--width", "200"]) == 0
    out = capsys.readouterr().out
    assert "solved again without the choice" in out
    assert "pins" in out and "memory limit" in out
    assert "made for" in failing([*asked, "--factory-args", '{"layers": 3}'], capsys)
    assert "Did you mean" in failing(["explain", "b.json", "--node", "einsom"], capsys)

    assert main(["diff", "a.json", "b.json", "--width", "100"]) == 0
    out = capsys.readouterr().out
    assert "step time" in out and "data=4" in out and "nothing" in out
    assert max(map(len, out.splitlines())) <= 100

    assert main(["report", "a.json", "-o", "a.html"]) == 0
    assert "saved to a.html" in capsys.readouterr().out
    assert (project / "a.html").read_text().startswith("<!doctype html>")
    failing(["report", "a.json", "-o", "nowhere/a.html"], capsys)

    message = failing(["trace", "a.json", "-o", "a.json.gz", "--ranks", "99"], capsys)
    assert "--ranks 99: the plan is for 4 devices" in message
    assert main(["trace", "a.json", "-o", "a.json.gz", "--ranks", "2"]) == 0
    assert "saved 2 ranks" in capsys.readouterr().out
