"""Plots that `benchmarks/vllm/serve_plot.py` draws of results of serve.py."""

import json

import pytest

from benchmarks.vllm.serve_plot import FIGURES, draw, main, points


def served(tokens: int) -> dict:
    spread = {"mean": 3.0, "p50": 2.0, "p95": 9.0, "p99": 11.0}
    return {"prompt_tokens_per_s": tokens, "hit": 0.5, "first_token_ms": spread, "between_tokens_ms": None}


def run(users: int | None, **cells: int) -> dict:
    names = {name.replace("_at_", "@"): tokens for name, tokens in cells.items()}
    of_each = [{"engine": name, "device": "H100", "served": served(tokens)} for name, tokens in names.items()]
    return {"load": {"users": users}, "cells": of_each}


def rates(lines: dict) -> dict:
    return {
        name: {place: each["prompt_tokens_per_s"] for place, each in found.items()} for name, found in lines.items()
    }


def test_over_host_memory_a_line_is_of_one_file():
    runs = [("a", run(24, ours_at_16=5, ours_at_40=9, none=1)), ("b", run(24, ours_at_40=8)), ("convoys", {})]
    assert rates(points(runs, "host")) == {"ours, a": {16: 5, 40: 9}, "none, a": {0: 1}, "ours, b": {40: 8}}


def test_two_states_of_an_engine_in_one_file_are_two_lines():
    runs = [("a", run(24, **{"ours_at_40": 9, "ours_at_40 before": 8}))]
    assert rates(points(runs, "host")) == {"ours, a": {40: 9}, "ours before, a": {40: 8}}


def test_over_users_engines_of_another_size_are_lines_of_their_own():
    loops = [run(8, ours_at_16=5, ours_at_40=9), run(64, ours_at_40=7), run(64, ours_at_40=8), run(None, ours_at_40=1)]
    runs = [(str(at), each) for at, each in enumerate(loops)]
    assert rates(points(runs, "users")) == {"ours@16 GiB, H100": {8: 5}, "ours@40 GiB, H100": {8: 9, 64: 8}}


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib")


def test_every_figure_has_a_panel_with_every_line(matplotlib):
    figure = draw(points([("a", run(24, ours_at_16=5, none=1))], "host"), "host")
    assert [panel.get_title() for panel in figure.axes] == list(FIGURES)
    assert all(len(panel.lines) == 2 for panel in figure.axes)


def test_a_plot_is_written(matplotlib, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(run(24, ours_at_16=5)))
    main([str(tmp_path / "plot.png"), str(tmp_path / "a.json")])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_files_without_anything_to_draw_are_refused(matplotlib, tmp_path, capsys):
    (tmp_path / "a.json").write_text(
        json.dumps({"load": {"users": 24}, "cells": [{"engine": "ours@40", "convoy": {}}]})
    )
    with pytest.raises(SystemExit):
        main([str(tmp_path / "plot.png"), str(tmp_path / "a.json")])
    assert "nothing to draw over host memory" in capsys.readouterr().err
