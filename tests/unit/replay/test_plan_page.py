"""The knee, sentences and page of a plan, on a made curve."""

import re
from dataclasses import replace
from html import unescape
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from cpu_prefix_cache.tools.plan.curves import CODED, TIER, Curve, preferred_of, sizes_of
from cpu_prefix_cache.tools.plan.drawing import areas
from cpu_prefix_cache.tools.plan.page import page
from cpu_prefix_cache.tools.plan.plan import Plan
from cpu_prefix_cache.tools.plan.sentences import sentences
from cpu_prefix_cache.tools.plan.table import ENGINES_NOTE, tables
from cpu_prefix_cache.tools.plan.worth import Worth
from cpu_prefix_cache.tools.replay.knee import flat_from
from cpu_prefix_cache.tools.replay.outcome import Outcome, Ratios, Tally
from cpu_prefix_cache.tools.replay.seconds_saved import Rates
from tests.unit.replay.traces import trace_of

SAVED = (0.03, 0.05, 0.09, 0.14, 0.19, 0.2, 0.2)
RISING = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
SIZES = ["64 GiB", "128 GiB", "256 GiB", "512 GiB", "1 TiB", "2 TiB", "4 TiB"]


def curve(policy, shares, variant=""):
    """Nothing of the prompts is a hit; the seconds are made up."""
    outcomes = [
        Outcome(policy, at + 1, None, None, Tally(), Ratios(), 100, 1.0, seconds_saved=100 * share, share_saved=share)
        for at, share in enumerate(shares)
    ]
    return Curve(policy, tuple(outcomes), variant)


def plan_of(*curves, price=None, gib_price=0.0, most=None):
    """A load of 101 requests of a token each, a second apart; a token takes a second. An engine has two GPUs."""
    trace = trace_of("a" * 101)
    worth = Worth(trace, Rates(1.0, gpu_price=price), Tally(), engine_gpus=2, gib_price=gib_price)
    policies, variants = (tuple(each for each in curves if bool(each.variant) is is_one) for is_one in (False, True))
    return Plan(worth, sizes_of("64GiB:4TiB"), most or max(curves[0].shares), policies, variants)


MADE = plan_of(curve("lru", SAVED), curve("adaptive", (*SAVED[:4], 0.193, 0.2, 0.2)), curve("lru", SAVED[:4], TIER))


@pytest.mark.parametrize(
    ("shares", "knee"),
    [
        (SAVED, 4),
        (RISING, None),
        ((0.3,) * 7, 0),
        ((0.1, 0.2, 0.2, 0.2, 0.25, 0.26, 0.26), 4),  # a step after a level is no knee before it
        ((0.1, 0.2, 0.2, 0.2, 0.2, 0.2, 0.24), None),
    ],
)
def test_the_knee_is_where_no_later_doubling_adds_two_points(shares, knee):
    assert flat_from(shares) == knee == plan_of(curve("lru", shares)).knee
    later = [more - less for less, more in pairwise(shares)]
    assert knee is None or (max(later[knee:]) < 0.02 and (knee == 0 or later[knee - 1] >= 0.02))


def test_three_sentences_have_the_knee_its_neighbours_and_the_other_curves():
    first, second, third = sentences(MADE)
    assert first.startswith("1 TiB of host memory save 19.0% of prefill, 0.38 of the 2.02 GPUs")
    assert (
        second == "Half of it saves 5.0 points less; twice as much adds 1.0 points; above 2 TiB there is nothing more."
    )
    assert third == "At 1 TiB, compared with lru: adaptive 0.3 points more, lru + tier needs more than it has."


def test_money_is_that_of_engines_less_that_of_memory():
    plan = plan_of(curve("lru", SAVED), price=1000.0, gib_price=360.0)
    saved = 0.19 * 1000 * 730  # engines, an hour, hours a month
    assert f"that leaves {saved - 1024 * 10:,.0f} a month" in sentences(plan)[0]
    assert "a month" not in sentences(plan_of(curve("lru", SAVED)))[0]


def test_memory_that_costs_more_than_it_saves_has_no_best_size():
    cheap, dear = (plan_of(curve("lru", SAVED), price=1.0, gib_price=gib_price) for gib_price in (0.36, 36.0))
    assert (cheap.most_money, dear.most_money) == (SIZES.index("1 TiB"), None)
    assert "most money" in tables(cheap) and "most money" not in tables(dear)


@pytest.mark.parametrize(("most", "at"), [(0.2, 4), (0.21, 4), (0.22, 5), (0.25, None)])
def test_the_first_size_that_saves_nine_tenths_of_what_any_memory_would_is_marked(most, at):
    plan = plan_of(curve("lru", SAVED), most=most)
    assert plan.enough == at
    marked = [line for line in tables(plan).splitlines() if "90% of all" in line]
    assert [line.split("  ")[0] for line in marked] == ([] if at is None else [SIZES[at]])


def test_a_load_beyond_one_engine_has_a_note():
    """An engine has two GPUs, and this load keeps 2.02 of them busy; less if they are faster."""
    assert ENGINES_NOTE in tables(MADE)
    faster = replace(MADE, worth=replace(MADE.worth, rates=Rates(1.1)))
    assert ENGINES_NOTE not in tables(faster)


def test_something_more_is_denied_only_where_a_larger_size_was_replayed():
    _, around, _ = sentences(plan_of(curve("lru", (*SAVED[:5], 0.195, 0.2))))
    assert around == "Half of it saves 5.0 points less; twice as much adds 0.5 points."


def test_a_curve_that_rises_to_its_end_has_no_knee():
    first, second, _ = sentences(plan_of(curve("lru", RISING), curve("lru", RISING, CODED)))
    assert first.startswith("4 TiB of host memory save 30.0%")
    assert second == "Half of it saves 5.0 points less; the curve still rises there."


def test_a_policy_is_preferred_to_the_default_for_half_a_point_on_average():
    lru = curve("lru", SAVED)
    nearly, better = (curve("arc", [share + more for share in SAVED]) for more in (0.004, 0.006))
    assert preferred_of([lru, nearly]) is lru and preferred_of([lru, better]) is better


# The page


@pytest.fixture(scope="module")
def made():
    return page(MADE, "a <b> & c.jsonl", ["two\nlines"])


def tree_of(html):
    return ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>"))


def test_it_can_be_parsed_and_has_all_sentences(made):
    texts = [element.text for element in tree_of(made).iter("p")]
    assert [*sentences(MADE)] == texts[:3]
    assert "Host memory for a <b> & c.jsonl" in unescape(made) and "a <b>" not in made


def test_it_stands_alone(made):
    loads = re.compile(r"https?:|src=|href|url\(|@import|<script|<link", re.IGNORECASE)
    assert not loads.search(made)
    assert loads.search('<img src="curve.png"/>')


def lines_of(made):
    """Places of the points of each curve, by colour and dashes."""
    places = {}
    for line in tree_of(made).iter("polyline"):
        points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        places[line.get("stroke"), line.get("stroke-dasharray")] = points
    return places


def test_points_are_as_high_as_their_values(made):
    """The ticks of the axis give the scale: values and heights of two of them."""
    ticks = {}
    for text in tree_of(made).find(".//svg[@role]").iter("text"):
        if re.fullmatch(r"\d+%", text.text):
            ticks[float(text.text[:-1]) / 100] = float(text.get("y")) - 4
    assert all(0 < y < 340 for y in ticks.values())
    (low, bottom), (high, top) = min(ticks.items()), max(ticks.items())

    def values(points):
        return [low + (y - bottom) / (top - bottom) * (high - low) for _, y in points]

    lru = lines_of(made)["#0072b2", "none"]
    assert values(lru) == pytest.approx(SAVED, abs=0.001)
    assert values(lru) != pytest.approx((*SAVED[:6], 0.21), abs=0.001)
    across = [x for x, _ in lru]
    assert across == sorted(across) and across[1] - across[0] == pytest.approx(across[6] - across[5], abs=0.2)


def test_a_policy_has_its_colour_whatever_stands_beside_it(made):
    alone = page(plan_of(curve("adaptive", SAVED)), "t", [])
    assert set(lines_of(made)) == {("#0072b2", "none"), ("#d55e00", "none"), ("#0072b2", "2 4")}
    assert set(lines_of(alone)) == {("#d55e00", "none")}


def test_each_area_is_as_high_as_its_share_and_stands_on_the_one_before():
    layers = {"device": [0.5, 0.25, 0.0], "host": [0.3, 0.25, 0.4], "computed": [0.2, 0.5, 0.6]}
    drawn = ElementTree.fromstring(areas(layers, dict.fromkeys(layers, "#000"), ["a", "b", "c"]))
    floor = None
    for polygon, shares in zip(drawn.iter("polygon"), layers.values(), strict=True):
        heights = [-float(point.split(",")[1]) for point in polygon.get("points").split()]
        ceiling, below = heights[:3], heights[:2:-1]
        whole = 340 - 24 - 40  # of the drawing, less what is above and below it
        assert [more - less for more, less in zip(ceiling, below, strict=True)] == pytest.approx(
            [share * whole for share in shares], abs=0.2
        )
        assert floor is None or below == floor
        floor = ceiling


def test_areas_of_where_tokens_came_from_fill_the_drawing(made):
    drawn = list(tree_of(made).iter("polygon"))
    assert [area.find("title").text for area in drawn] == ["device", "host", "tier", "computed"]
    outline = [tuple(map(float, point.split(","))) for point in drawn[-1].get("points").split()]
    assert len(outline) == 2 * (len(SIZES) + 1)  # no host, too
    assert max(y for _, y in outline) - min(y for _, y in outline) > 200  # here all is computed
