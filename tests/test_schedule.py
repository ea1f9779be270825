"""Pipeline schedules and their simulation, over a grid of ranks, microbatches and chunks."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest

from autopar.core.flights import (
    ALL,
    ALONE,
    INPUT,
    NONE,
    arrived,
    flights,
    in_any_order,
    moments,
)  # fmt: skip
from autopar.core.held import Held
from autopar.core.list_schedule import RankLoad, list_schedule, most_ahead
from autopar.core.schedule import (
    AUTOMATIC,
    SCHEDULES,
    Action,
    actions,
    in_flight,
    kinds_of,
    orders_of,
)  # fmt: skip
from autopar.cost_model.pipeline import ScheduleError, simulate_pipeline
from autopar.cost_model.rank_memory import rank_memory, rank_moments
from autopar.errors import ConstraintError

SPLIT = ("zero-bubble", AUTOMATIC)  # whose backward is in two parts
EQUAL = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}

GRID = [
    (schedule, p, m, v)
    for schedule in SCHEDULES
    for p in (1, 2, 3, 4, 8)
    for m in (1, 2, 3, 4, 8, 16, 24)
    for v in ((2, 3) if schedule == "interleaved" else (1,))
    if schedule != "interleaved" or m % p == 0
]


@pytest.mark.parametrize(("schedule", "p", "m", "v"), GRID)
def test_every_schedule_runs_each_action_once_and_after_what_it_needs(schedule, p, m, v):
    orders = actions(schedule, p, m, v)
    kinds = "FIW" if schedule in SPLIT else "FB"
    want = Counter(Action(k, s, i) for k in kinds for s in range(p * v) for i in range(m))
    assert Counter(a for order in orders for a in order) == want
    uneven = [{k: t * (1 + 0.3 * (s % 3)) for k, t in EQUAL.items()} for s in range(p * v)]
    result = simulate_pipeline(orders, uneven, 0.25)
    when = {span.action: span for span in result.spans}
    assert len(when) == sum(want.values())
    for action, span in when.items():
        for needed in _needs(action, p * v, kinds):
            sent_s = 0.25 if needed.stage % p != action.stage % p else 0.0
            assert span.start_s >= when[needed].end_s + sent_s - 1e-12, (action, needed)
    for rank in range(p):
        own = [s for s in result.spans if s.rank == rank]
        assert [s.action for s in own] == list(orders[rank])
        for before, after in itertools.pairwise(own):
            assert after.start_s >= before.end_s - 1e-12
        assert result.busy_s[rank] + result.idle_s[rank] == pytest.approx(result.step_s)


def _needs(action, num_stages, kinds):
    """The dependencies as the module's docstring states them."""
    k, s, i = action.kind, action.stage, action.microbatch
    gradient = kinds[1]
    if k == "F":
        return [Action("F", s - 1, i)] if s else []
    if k == "W":
        return [Action("I", s, i)]
    later = [Action(gradient, s + 1, i)] if s + 1 < num_stages else []
    return [Action("F", s, i), *later]


@pytest.mark.parametrize(("schedule", "p", "m", "v"), GRID)
def test_idle_share_is_that_of_the_papers(schedule, p, m, v):
    result = simulate_pipeline(actions(schedule, p, m, v), [EQUAL] * (p * v))
    if schedule not in SPLIT:
        assert result.bubble_fraction == pytest.approx((p - 1) / (v * m + p - 1))
        return
    plain = simulate_pipeline(actions("1f1b", p, m), [EQUAL] * p)
    assert result.bubble_fraction < plain.bubble_fraction or p == 1
    if m >= p:
        assert result.bubble_fraction == pytest.approx((p - 1) / (3 * m + p - 1))


@pytest.mark.parametrize(("schedule", "p", "m", "v"), GRID)
def test_activations_in_flight(schedule, p, m, v):
    held = in_flight(actions(schedule, p, m, v))
    assert len(held.ranks) == p
    assert len(held.stages) == p * v
    if schedule == "gpipe":
        assert held.ranks == (m,) * p
    elif schedule == "1f1b":
        assert held.ranks == tuple(min(m, p - s) for s in range(p))
    elif schedule == "automatic":
        assert max(held.ranks) <= min(m, 2 * p - 1)
        assert held.ranks[0] == min(m, 2 * p - 1)
    elif schedule == "zero-bubble":
        assert held.ranks == (min(m, p),) * p
    else:
        warmup = [2 * (p - r - 1) + (v - 1) * p for r in range(p)]
        assert held.ranks == tuple(min(m * v, w + 1) for w in warmup)
    assert all(1 <= n <= m for n in held.stages)


def test_a_slow_link_delays_one_message_by_the_other_and_computing_goes_on():
    orders = actions("gpipe", 2, 2)
    result = simulate_pipeline(orders, [{"F": 1.0, "B": 2.0}] * 2, 5.0)
    starts = {str(s.action): s.start_s for s in result.spans}
    assert starts["0F1"] == 1.0  # beside the first message
    assert starts["1F0"] == 6.0
    assert starts["1F1"] == 11.0  # the second message left at 6, when the link was free
    # 1B0 ends at 14 and 1B1 at 16; messages arrive at 19 and 24
    assert starts["0B0"] == 19.0
    assert result.step_s == 26.0


def test_one_number_for_each_boundary():
    seconds = [{"F": 1.0, "B": 2.0}] * 3
    result = simulate_pipeline(actions("1f1b", 3, 1), seconds, [2.0, 0.5])
    assert result.step_s == pytest.approx(9.0 + 2 * 2.5)
    with pytest.raises(ScheduleError, match="2 boundaries"):
        simulate_pipeline(actions("1f1b", 3, 1), seconds, [1.0])


def test_a_deadlock_names_the_ranks_that_wait():
    first, second = actions("1f1b", 2, 2)
    backward_first = (second[1], second[0], *second[2:])
    with pytest.raises(ScheduleError, match=r"deadlocks: 2 of 2.*rank 1 at 1B0"):
        simulate_pipeline((first, backward_first), [EQUAL] * 2)


def test_lost_doubled_and_misplaced_actions_are_refused():
    first, second = actions("1f1b", 2, 2)
    for broken in ((first, second[:-1]), (first, (*second, second[-1]))):
        with pytest.raises(ScheduleError, match="stage 1, microbatch 1 has"):
            simulate_pipeline(broken, [EQUAL] * 2)
    with pytest.raises(ScheduleError, match="1F0 is on rank 0"):
        simulate_pipeline((second, first), [EQUAL] * 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1F1B", 2, 2), "use one of gpipe, 1f1b, interleaved, zero-bubble, automatic"),
        (("1f1b", 0, 2), "ranks is 0"),
        (("1f1b", 2, 0), "microbatches is 0"),
        (("1f1b", 2, 2, 2), "one stage a rank, not 2"),
        (("interleaved", 2, 2), "chunks >= 2"),
        (("interleaved", 4, 6, 2), "use 8 microbatches"),
    ],
)
def test_numbers_that_a_schedule_does_not_take(arguments, said):
    with pytest.raises(ConstraintError, match=said):
        actions(*arguments)


def test_a_blocking_rank_computes_nothing_while_it_sends():
    orders = actions("gpipe", 2, 2)
    seconds = [{"F": 1.0, "B": 2.0}] * 2
    result = simulate_pipeline(orders, seconds, 5.0, blocking=True)
    starts = {str(s.action): s.start_s for s in result.spans}
    assert starts["0F1"] == 6.0
    assert result.step_s > simulate_pipeline(orders, seconds, 5.0).step_s


@pytest.mark.parametrize(("schedule", "p", "m", "v"), GRID)
def test_what_is_waited_for_has_arrived_however_ranks_are_delayed(schedule, p, m, v):
    orders, draw = actions(schedule, p, m, v), random.Random(0)
    known = arrived(orders)
    for order, there in zip(orders, known, strict=True):
        found = [a for row in there for a in row]
        assert len(set(found)) == len(found) and set(found) <= set(order)
    begun, ended = set(), set()
    positions = [0] * p
    while any(positions[r] < len(orders[r]) for r in range(p)):
        rank = draw.randrange(p)  # a rank that is never drawn for long is a slow one
        if positions[rank] == len(orders[rank]):
            continue
        action = orders[rank][positions[rank]]
        kinds = "FIW" if schedule in SPLIT else "FB"
        if not set(_needs(action, p * v, kinds)) <= ended:
            continue
        for sent in known[rank][positions[rank]]:
            kind = "F" if sent.kind == "F" else kinds[1]
            stage = sent.stage + (1 if kind == "F" else -1)
            assert Action(kind, stage, sent.microbatch) in begun | {action}
        begun.add(action)
        ended.add(action)
        positions[rank] += 1


@pytest.mark.parametrize(("schedule", "p", "m", "v"), GRID)
def test_the_moments_of_a_rank_hold_what_is_in_flight(schedule, p, m, v):
    orders = actions(schedule, p, m, v)
    held = in_flight(orders)
    for rank, found in enumerate(moments(orders)):
        assert [moment.action for moment in found] == list(orders[rank])
        of_rank = [sum(o.waiting + o.delayed for o in f.held.values()) for f in found]
        assert 1 + max(of_rank) == held.ranks[rank]
        for s in range(rank, p * v, p):
            own = [f.held[s] for f in found if f.action.stage == s]
            assert 1 + max(o.waiting + o.delayed for o in own) == held.stages[s]
            assert all(o.delayed == 0 for o in own) or schedule in SPLIT
        last = found[-1]
        assert all(o.waiting == o.delayed == 0 for o in last.held.values())


@pytest.mark.parametrize(("schedule", "p", "m", "v"), GRID)
def test_a_flight_holds_no_less_than_any_moment(schedule, p, m, v):
    orders = actions(schedule, p, m, v)
    found = flights(orders)
    assert all(f.splits == (schedule in SPLIT) for f in found)
    for moment in (moment for rank in moments(orders) for moment in rank):
        stage = moment.action.stage
        now = moment.held[stage]
        begun = [a for a in orders[stage % p] if a.stage == stage]
        begun = begun[: begun.index(moment.action)]
        sums = ALL if any(a.kind in "BW" for a in begun) else NONE
        sums = max(sums, INPUT if any(a.kind == "I" for a in begun) else NONE)
        assert moment.sums[stage] == sums
        part = {"F": 0, "B": 1, "I": 1, "W": 2}[moment.action.kind]
        most = found[stage].rows[sums][part]
        assert most is not None and most.most(now) == most
        assert found[stage].part(part).most(now) == found[stage].part(part)
        assert 1 + now.waiting + now.delayed <= found[stage].microbatches


@pytest.mark.parametrize(("schedule", "p", "m", "v"), GRID)
def test_a_rank_peaks_where_its_stages_do_so_together(schedule, p, m, v):
    """The memory of ranks against a replay of what each action allocates and frees."""
    orders, draw = actions(schedule, p, m, v), random.Random(7)
    kinds = ("F", "I", "W") if schedule in SPLIT else ("F", "B")
    held = [_random_held(draw, schedule in SPLIT) for _ in range(p * v)]
    found = rank_memory(orders, held)
    for rank, there in enumerate(arrived(orders)):
        own = {s: held[s] for s in range(rank, p * v, p)}
        assert sum(found[rank].values()) == _replayed(orders[rank], there, own, p * v)
        told = list(rank_moments(orders, list(own.values()), rank))
        assert max(sum(row.memory.values()) for row in told) == sum(found[rank].values())
        ran = [Action(row.kind, row.stage, row.microbatch) for row in told if row.kind in kinds]
        assert ran == list(orders[rank])


def _random_held(draw, splits):
    idle, extra = draw.randrange(100), [draw.randrange(50) for _ in range(3)]
    sums = (draw.randrange(20), draw.randrange(20) if splits else 0)
    tops = {}
    for begun in (NONE, INPUT, ALL):
        there = idle + sum(sums[:begun])
        after_backward = idle + sum(sums[: max(begun, INPUT)])
        tops[begun, -1] = tops[begun, 0] = {"all": there + extra[0]}
        tops[begun, 1] = {"all": after_backward + extra[1]}
        tops[begun, 2] = {"all": idle + sum(sums) + extra[2]}
        tops[begun, 3] = {"all": idle + sum(sums)}
    waiting, delayed = {"all": draw.randrange(9)}, {"all": draw.randrange(9)}
    return Held(
        batch=0,
        idle={"all": idle},
        waiting=waiting,
        delayed=delayed,
        up=draw.randrange(5),
        down=draw.randrange(5),
        sums=sums,
        tops=tops,
        after={"all": 0},
    )


def _replayed(order, there, own, stages):
    """Bytes of a rank at its highest moment, one action after the other."""
    live = sum(h.idle["all"] for h in own.values())
    most = max(live - h.idle["all"] + h.tops[NONE, -1]["all"] for h in own.values())
    made = dict.fromkeys(own, NONE)
    for action, landed in zip(order, there, strict=True):
        for sent in landed:
            live -= _sent_bytes(own[sent.stage], sent, stages)
        s = action.stage
        h = own[s]
        kept = h.waiting if action.kind in "BI" else h.delayed if action.kind == "W" else None
        live -= kept["all"] if kept is not None else 0
        begun = h.idle["all"] + sum(h.sums[: made[s]])
        part = {"F": 0, "B": 1, "I": 1, "W": 2}[action.kind]
        most = max(most, live - begun + h.tops[made[s], part]["all"])
        if action.kind != "F":
            now = max(made[s], INPUT if action.kind == "I" else ALL)
            live += sum(h.sums[:now]) - sum(h.sums[: made[s]])
            made[s] = now
        live += h.waiting["all"] if action.kind == "F" else 0
        live += h.delayed["all"] if action.kind == "I" else 0
        live += _sent_bytes(h, action, stages)
    return max(most, sum(h.idle["all"] + sum(h.sums) for h in own.values()))


def _sent_bytes(held, action, stages):
    if action.kind == "F":
        return held.up if action.stage + 1 < stages else 0
    return held.down if action.kind in "BI" and action.stage else 0


@pytest.mark.parametrize(
    ("schedule", "p", "m", "v"), [g for g in GRID if g[2] >= g[1] and g[0] != AUTOMATIC]
)
def test_what_ranks_wait_for_is_what_equal_stages_take(schedule, p, m, v):
    """Of a split backward, halfway to what a rank does itself."""
    seconds = {"F": 1.0, "I": 1.1, "W": 0.7, "B": 1.8}
    orders = actions(schedule, p, m, v)
    took = simulate_pipeline(orders, [seconds] * (p * v)).step_s
    own = m * v * sum(seconds[k] for k in "FIW")
    for flight in flights(orders):
        assert flight.waits.prepare == flight.waits.finish == 1.0
        at_turns = zip(flight.waits[1:4], "FIW", strict=True)
        counted = m * v * sum(waits * seconds[k] for waits, k in at_turns)
        wanted = 0.5 * (took + own) if schedule in SPLIT else took
        assert counted == pytest.approx(wanted)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (4, 4), (4, 6), (4, 7), (4, 16), (8, 8)])
def test_flights_of_any_order_have_every_sum_and_wait_less_with_more_turns(p, m):
    given = flights(actions("1f1b", p, m))
    found = in_any_order(given, p, m)
    for flight, plain in zip(found, given, strict=True):
        assert flight.splits
        rows = [(s, part) for s, row in enumerate(flight.rows) for part, o in enumerate(row) if o]
        assert rows == [(s, part) for s in range(3) for part in range(3) if s or part < 2]
        for row, before in zip(flight.rows, plain.rows, strict=True):
            assert all(b is None or a == b for a, b in zip(row, before, strict=True))
        assert (flight.waits == ALONE) == (m >= 2 * p - 1)
        assert flight.waits.weights <= 1.0 <= flight.waits.forward == flight.waits.inputs


@pytest.mark.parametrize("seed", range(30))
def test_list_schedules_keep_to_their_warmup_and_memory(seed):
    """With unequal stages, slow links and little memory they still run every action."""
    rng = random.Random(seed)
    p, m = rng.randint(1, 6), rng.randint(1, 12)
    loads = [
        RankLoad(
            forward_s=rng.uniform(0.2, 2.0), input_s=rng.uniform(0.2, 2.0),
            weight_s=rng.uniform(0.0, 2.0), begin_s=rng.uniform(0.0, 3.0),
            waiting=rng.uniform(1.0, 2.0), delayed=rng.uniform(0.0, 1.0),
            budget=rng.choice([0.5, 3.0, 8.0, math.inf]),
        )
        for _ in range(p)
    ]  # fmt: skip
    transfer_s = [rng.choice([0.0, 0.5, 3.0]) for _ in range(p - 1)]
    warmup = [rng.randint(1, m) for _ in range(p)]
    listed = list_schedule(loads, m, transfer_s, warmup=warmup, patience=rng.choice([0.0, 1.0]))
    assert kinds_of(orders_of(listed.kinds)) == listed.kinds
    seconds = [{"F": x.forward_s, "I": x.input_s, "W": x.weight_s} for x in loads]
    begin_s = [x.begin_s for x in loads]
    run = simulate_pipeline(orders_of(listed.kinds), seconds, transfer_s, begin_s=begin_s)
    assert run.finish_s() == pytest.approx(list(listed.ends_s))  # the clock of both is one
    for load, kinds, most in zip(loads, listed.kinds, warmup, strict=True):
        counts = Counter()
        for kind in kinds:
            counts[kind] += 1
            waiting, delayed = counts["F"] - counts["I"], counts["I"] - counts["W"]
            assert 0 <= waiting <= most and delayed >= 0
            if kind == "F" and waiting + delayed > 1:
                assert waiting * load.waiting + delayed * load.delayed <= load.budget + 1e-9
        assert counts == {"F": m, "I": m, "W": m}


def test_an_automatic_schedule_fills_what_unequal_stages_leave():
    """With more forwards ahead the rank with most to do never waits for gradients."""
    p, m = 4, 8
    seconds = [{"F": n * 1.0, "I": n * 1.2, "W": n * 0.8} for n in (5, 6, 5, 4)]
    loads = [RankLoad(forward_s=s["F"], input_s=s["I"], weight_s=s["W"]) for s in seconds]
    own = list_schedule(loads, m, [0.0] * 3, warmup=most_ahead(p, m), patience=0.0)
    took = simulate_pipeline(orders_of(own.kinds), seconds).step_s
    fixed = simulate_pipeline(actions("zero-bubble", p, m), seconds).step_s
    assert took == pytest.approx(5.0 + m * 18.0)  # the second rank begins at 5 and never stops
    assert fixed > 1.05 * took
