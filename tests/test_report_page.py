"""The page of a plan: complete, without requests, safe with hostile names, and not too wide."""

from __future__ import annotations

import itertools
import json
import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from torch import nn

import autopar
from autopar.core.placement import Replicate, Shard, local_index_runs
from autopar.core.plan import Plan
from autopar.report.page import page_data, render_page
from tests import handwritten as hw
from tests.browser import browser, inspect
from tests.folding import cluster
from tests.test_folding import TEXT, llama
from tests.test_report import made

in_browser = pytest.mark.skipif(browser() is None, reason="no Chromium is installed")

HOSTILE = "</script><img src=x onerror=alert(1)><b>'\"&amp;"


class Hostile(nn.Module):
    """A module whose names are markup."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = hw.Mlp(layers=6)
        self.mlp.register_parameter(HOSTILE, nn.Parameter(self.mlp.head.weight.detach().clone()))

    def forward(self, x: Any, labels: Any) -> Any:
        extra = (x @ self.mlp.get_parameter(HOSTILE).T).square().mean()
        return self.mlp(x, labels) + extra


@pytest.fixture(scope="module")
def hostile() -> Plan:
    return autopar.plan(Hostile(), cluster(2, 2), hw.vectors(), constraints={"data": 2})


@pytest.fixture(scope="module")
def deep() -> Plan:
    pins = {"data": 2, "tensor": {"mode": "2d", "size": 4}}
    return autopar.plan(llama(9), cluster(8), TEXT, constraints=pins)


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_nothing_of_the_users_is_markup(hostile: Plan) -> None:
    assert f"mlp.{HOSTILE}" in hostile.parameters
    text = render_page(hostile)
    tags = Tags(text).found
    names = [tag for tag, _ in tags]
    assert names.count("script") == 2 and "img" not in names
    assert not any(key.startswith("on") for _, attributes in tags for key in attributes)
    assert HOSTILE not in text


def test_nothing_is_loaded(hostile: Plan) -> None:
    text = render_page(hostile)
    for tag, attributes in Tags(text).found:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base")
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|import\(|WebSocket", text)


def test_the_data_is_the_plans(deep: Plan) -> None:
    data = page_data(deep)
    assert json.loads(json.dumps(data)) == data
    assert len(data["ops"]) == len(deep.nodes)
    assert sum(row["count"] for row in data["parameters"]) == len(deep.parameters)
    seconds = sum(s for _, by_phase in data["compute"] for _, s in by_phase)
    seconds += sum(row[4] - row[5] for row in data["communication"])
    seconds += deep.predicted.update_s
    assert seconds == pytest.approx(deep.predicted.step_time_s, rel=1e-8)
    memory = data["memory"]
    (view,) = memory["views"]
    highest = max(sum(memory["table"][row]) for row in view["rows"] if row >= 0)
    assert highest == deep.predicted.peak_memory_bytes
    assert 0 < view["backward_s"] < deep.predicted.step_time_s == view["seconds"]


def test_plans_without_a_timeline_have_a_page() -> None:
    data = page_data(made({"w": ((8, 8), (Replicate(), Shard(0)), "")}))
    assert data["ops"] == [] and data["memory"]["views"] == []


@in_browser
@pytest.mark.parametrize("width", [800, 1280])
@pytest.mark.parametrize("name", ["hostile", "deep"])
def test_it_opens_and_fits(name: str, width: int, request: pytest.FixtureRequest) -> None:
    plan: Plan = request.getfixturevalue(name)
    seen = inspect(
        render_page(plan),
        width,
        """(d) => ({
          tensors: [...d.querySelectorAll('#tensor-list button .mono')].map((b) => b.textContent),
          devices: d.querySelectorAll('#mesh-svg rect').length,
          rows: d.querySelectorAll('#op-table tbody tr').length,
          program: d.querySelectorAll('#program-rows .row').length,
          graph: d.querySelectorAll('#graph-rows .row').length,
          areas: d.querySelectorAll('#memory-svg path').length,
          images: d.images.length,
          bars: d.querySelectorAll('.bar').length })""",
    )
    assert seen["ready"] == "yes"
    assert seen["requests"] == []
    assert seen["width"] <= width
    found = seen["found"]
    assert found["images"] == 0
    assert found["devices"] == math.prod(plan.mesh_shape)
    assert found["rows"] == min(60, len(plan.nodes))
    assert found["program"] > 2 and found["graph"] > 5 and found["areas"] > 3
    assert found["bars"] == len(page_data(plan)["compute"]) + len(plan.predicted.comm_bytes)
    if name == "hostile":
        assert any(HOSTILE in text for text in found["tensors"])


@in_browser
def test_search_sort_and_choice(deep: Plan) -> None:
    found = inspect(
        render_page(deep),
        1280,
        """(d, w) => {
          const input = (id, text) => { const e = d.getElementById(id); e.value = text;
            e.dispatchEvent(new w.Event('input')); };
          const rows = () => [...d.querySelectorAll('#op-table tbody tr')];
          input('op-search', 'einsum backward down_proj');
          const searched = rows().map((r) => r.textContent);
          input('op-search', '');
          d.querySelectorAll('#op-table th')[0].click();
          const sorted = rows().map((r) => r.cells[0].querySelector('.mono').textContent);
          input('tensor-search', 'o_proj');
          const list = [...d.querySelectorAll('#tensor-list button')];
          list[0].click();
          const title = d.getElementById('tensor-title').textContent;
          const devices = [...d.querySelectorAll('#mesh-svg rect')];
          const colors = new Set(devices.map((r) => r.style.fill));
          rows()[0].click();
          return { searched, sorted, listed: list.length, title, colors: colors.size,
            after: d.getElementById('tensor-title').textContent };
        }""",
    )["found"]
    assert found["searched"]
    for text in found["searched"]:
        assert "einsum" in text and "backward" in text and "down_proj" in text
    assert found["sorted"] == sorted(found["sorted"])
    rows = [r for r in page_data(deep)["parameters"] if "o_proj" in r["name"]]
    assert found["listed"] == len(rows)
    assert "o_proj.weight" in found["title"]
    layout = zip(rows[0]["layout"], deep.mesh_shape, strict=True)
    blocks = math.prod(size for placement, size in layout if placement[0] == "S")
    assert found["colors"] == blocks
    assert found["after"].startswith(found["sorted"][0])


@in_browser
def test_the_program_of_a_block_can_be_followed(deep: Plan) -> None:
    found = inspect(
        render_page(deep),
        1280,
        """(d) => {
          const rows = () => [...d.querySelectorAll('#program-rows .row')];
          const texts = (query) => [...d.querySelectorAll(query)].map((e) => e.textContent);
          const pick = (id, value) => { const e = d.getElementById(id); e.value = value;
            e.dispatchEvent(new Event('change')); };
          const block = d.getElementById('program-block').selectedOptions[0].textContent;
          const parts = texts('#program-part option');
          const forward = rows().length;
          const chips = texts('#program-rows .chip');
          pick('program-part', 'backward');
          d.getElementById('program-views').click();
          const backward = rows().map((r) => r.querySelector('.place').textContent);
          rows()[rows().length - 1].click();
          const steps = [];
          for (let i = 0; i < 40; i++) {
            const call = d.querySelector('#program-node .call');
            steps.push(call.textContent);
            const link = call.querySelector('button');
            if (!link || i === 39) break;
            link.click();
          }
          const chosen = texts('#program-rows .chosen .place');
          let shown = 0, wrong = [];
          for (const option of [...d.getElementById('program-block').options]) {
            pick('program-block', option.value);
            for (const part of [...d.getElementById('program-part').options].map((o) => o.value)) {
              pick('program-part', part);
              for (const row of rows()) {
                row.click();
                const name = row.querySelector('.place').textContent;
                const call = d.querySelector('#program-node .call').textContent;
                shown += 1;
                if (!call.startsWith(`${name} = `)) wrong.push(name);
              }
            }
          }
          return { block, parts, forward, chips, backward, steps, shown, wrong,
            chosen, facts: texts('#program-node dt') };
        }""",
    )["found"]
    inner = max((x for x in deep.excerpts if x.block), key=lambda x: x.count)
    nodes = {node.name: node for node in inner.nodes}
    assert found["block"].startswith(f"{inner.block} ({inner.count} blocks run the same)")
    assert found["parts"] == ["forward", "backward"]
    own = [node for node in inner.nodes if node.part == "forward" and node.kind != "view"]
    assert found["forward"] == len(own)
    assert len(found["chips"]) == sum(node.sends is not None for node in own) > 0
    assert found["backward"] == [n.name for n in inner.nodes if n.part == "backward"]
    steps = [text.partition(" = ")[0] for text in found["steps"]]
    assert len(steps) > 3 and steps[0] == found["backward"][-1]
    for here, there in itertools.pairwise(steps):
        if here in nodes:  # it may lead to another block
            assert there == nodes[here].operands[0]
    assert found["chosen"] == [steps[-1]]
    assert found["wrong"] == []
    assert found["shown"] == sum(len(excerpt.nodes) for excerpt in deep.excerpts)
    assert {"yields", "read by"} <= set(found["facts"])


def as_older(plan: Plan) -> Plan:
    data = json.loads(json.dumps(plan.to_dict()))
    del data["excerpts"]
    return Plan.from_dict(data)


@in_browser
def test_a_plan_of_an_older_autopar_says_that_it_has_no_program(deep: Plan) -> None:
    page = render_page(as_older(deep))
    seen = inspect(page, 800, "(d) => d.getElementById('program').textContent")
    assert seen["ready"] == "yes" and "Plan again" in seen["found"]
    assert "Plan again" not in render_page(deep)


@in_browser
def test_the_picture_is_what_devices_hold(deep: Plan) -> None:
    """The script's runs of indices are those of `local_index_runs`."""
    layouts = [
        (Shard(0), Shard(0), Shard(1)),
        (Shard(0, split=4), Shard(0), Shard(0)),
        (Replicate(), Shard(1, split=3), Replicate()),
        (Shard(1), Replicate(), Shard(0)),
    ]
    coords = [(i, j, k) for i in range(2) for j in range(2) for k in range(2)]
    cases = [
        [[48, 24][dim], dim, [p.short for p in layout], at]
        for layout in layouts
        for at in coords
        for dim in (0, 1)
    ]
    call = "(cases) => cases.map(([n, dim, places, at]) => runs(n, dim, places.map(parsed), at))"
    probe = f"(d, w) => w.eval({json.dumps(call)})({json.dumps(cases)})"
    inline = "script-src 'unsafe-inline'"
    page = render_page(deep).replace(inline, f"{inline} 'unsafe-eval'")
    assert deep.mesh_shape == (2, 2, 2)
    seen = inspect(page, 1280, probe)["found"]
    expected = [
        [list(run) for run in local_index_runs([48, 24][dim], dim, layout, deep.mesh_shape, at)]
        for layout in layouts
        for at in coords
        for dim in (0, 1)
    ]
    assert seen == expected
