"""`plan`: its numbers are those of `replay`, GPUs and money those of arithmetic, and README's line runs as printed."""

import gzip
import json
import random
import re
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from examples.plan import make_trace

from cpu_prefix_cache.tools.cli import main, parser
from cpu_prefix_cache.tools.plan.curves import outcomes_by_size, sizes_of
from cpu_prefix_cache.tools.plan.setting import Setting, coded
from cpu_prefix_cache.tools.replay import replays
from cpu_prefix_cache.tools.replay.recorded import recorded
from cpu_prefix_cache.tools.replay.tiers import DeviceTier, HostTier
from tests.unit.replay.traces import mooncake_lines, random_prompts, trace_of, write

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "sizing.md"
SIZES = ["64GiB", "128GiB", "256GiB", "512GiB", "1TiB", "2TiB", "4TiB"]
GIB_SIZES = [64, 128, 256, 512, 1024, 2048, 4096]
BLOCK_GIB = 8
MODEL = {  # a block of 512 tokens has 8 GiB, so that a few blocks are sizes that one can buy
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8192,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
RATES = ["--prefill-rate", "1000", "--host-rate", "40000"]
WITH_DEVICE = [*RATES, "--device-capacity", "64GiB"]
WITH_TIER = ["--below", "8TiB", "--below-rate", "30000"]
FEW_REQUESTS = ["--limit", "40"]  # for what is the same of any requests


def prompts(seed=3, count=120):
    """Sessions that go on, in turns."""
    draw, sessions = random.Random(seed), [""] * 12
    for _ in range(count):
        at = draw.randrange(len(sessions))
        sessions[at] += "".join(draw.choices("abcdefgh", k=draw.randint(1, 3)))
        yield f"{chr(ord('A') + at)}{sessions[at]}"


@pytest.fixture(scope="module")
def on_load(tmp_path_factory):
    """Runs a command on the sessions. What it printed."""
    folder = tmp_path_factory.mktemp("load")
    trace = write(folder / "trace.jsonl", mooncake_lines(prompts()))
    (folder / "config.json").write_text(json.dumps(MODEL))

    def on_load(command, *options, weight=("--model", str(folder / "config.json"))):
        with redirect_stdout(StringIO()) as printed:
            assert main([command, trace, "--time-unit", "ms", *weight, *options]) == 0
        return printed.getvalue()

    return on_load


@pytest.fixture(scope="module")
def planned(on_load, tmp_path_factory):
    """A plan with all that one has: what it printed, and what it wrote."""
    out = tmp_path_factory.mktemp("plan") / "plan.json"
    printed = on_load("plan", *WITH_DEVICE, *WITH_TIER, "--gpu-price", "2", "--json", str(out))
    return printed, json.loads(out.read_text())


def lines_of(printed, title):
    """Head and rows below the line with this title."""
    return printed[printed.index(title) :].split("\n\n")[0].splitlines()[1:]


def rows_of(printed, title):
    """Rows below the line with this title, as dictionaries by the names of their columns."""
    head, *rows = lines_of(printed, title)
    split = re.compile(r"\s{2,}")
    names = split.split(head)
    return [
        dict(zip(names, split.split(row), strict=False)) for row in rows if row.split()[1] in ("GiB", "TiB", "host")
    ]


def saved(printed):
    return rows_of(printed, "prefill time saved")


@pytest.fixture
def replayed(on_load, tmp_path):
    """Results of `replay` at the sizes."""

    def replayed(policy, *options, sizes=SIZES):
        out = tmp_path / "replay.json"
        given = ["--policy", policy, "--capacity", ",".join(sizes), "--json", str(out)]
        on_load("replay", *WITH_DEVICE, *given, *options)
        return json.loads(out.read_text())["results"]

    return replayed


def shares(results):
    return [f"{result['prefill_share_saved']:.1%}" for result in results]


def test_each_curve_is_that_of_replay(planned, replayed):
    rows = saved(planned[0])
    best = next(name for name in rows[0] if name.endswith(" + coded")).removesuffix(" + coded")
    found = {name: [row[name] for row in rows[1:]] for name in rows[0]}
    results = {policy: replayed(policy) for policy in ("lru", "arc", "adaptive")}
    assert all(found[policy] == shares(results[policy]) for policy in results)
    assert found[f"{best} + coded"] == shares(replayed(best, "--codec", "exponent"))
    assert found[f"{best} + tier"] == shares(replayed(best, *WITH_TIER))
    span = 119  # seconds
    assert [row["saved"] for row in rows[1:]] == [
        f"{result['prefill_seconds_saved'] / span:.2f}" for result in results[best]
    ]
    # controls: these columns differ, and a host of another size has other numbers
    assert len({tuple(column) for name, column in found.items() if name == best or " + " in name}) == 3
    assert found[best][:1] != shares(replayed(best, sizes=["32GiB"]))


def test_tokens_came_from_where_replay_has_them_from(planned, replayed):
    printed, written = planned
    best = written["preferred"]
    alone, *rows = rows_of(printed, f"tokens of prompts with {best} + tier")
    for row, result in zip(rows, replayed(best, *WITH_TIER), strict=True):
        tiers = result["block_hit_ratio_by_tier"]
        assert [row["device"], row["host"], row["tier"]] == [
            f"{tiers[name]:.1%}" for name in ("device", "host", "below")
        ]
    assert any(row["tier"] != "0.0%" for row in rows) and any(row["host"] != "0.0%" for row in rows)
    assert (alone["host"], alone["tier"]) == ("0.0%", "0.0%") != (alone["device"], alone["computed"])
    for row in (alone, *rows):
        assert sum(float(row[name].rstrip("%")) for name in ("device", "host", "tier", "computed")) == pytest.approx(
            100, abs=0.2
        )


# Two prompts in turn, a block of 16 GiB each second for ten seconds: eight of ten are hits.
TEN = ["a", "b"] * 5
FREE = ["--bytes-per-token", str(2**34 // 512), "--prefill-rate", "512", "--policy", "lru"]
ONE_BLOCK = ["--device-capacity", "16GiB"]


@pytest.fixture
def plan_ten(tmp_path, run):
    trace = write(tmp_path / "ten.jsonl", mooncake_lines(TEN))

    def plan_ten(*options):
        code, printed = run("plan", trace, "--time-unit", "ms", *FREE, *options)
        assert code == 0, printed
        return saved(printed), printed

    return plan_ten


def test_gpus_and_money_are_those_of_arithmetic(plan_ten):
    rows, printed = plan_ten(*ONE_BLOCK, "--gpu-price", "2.25", "--gib-price", "36")
    needed, hits = 10 / 9, 8 / 9  # seconds of prefill, and those spared, over nine seconds
    assert (rows[0]["GPUs"], rows[1]["GPUs"], rows[1]["saved"]) == (f"{needed:.2f}", f"{needed - hits:.2f}", "0.89")
    assert [float(row["money a month"].split()[0].replace(",", "")) for row in rows[1:]] == [
        2 * 730 - gib for gib in (64, 128, 256, 512, 1024, 2048, 4096)
    ]
    assert "64 GiB of host memory save 80.0% of prefill, 0.89 of the 1.11 GPUs" in printed
    assert "that leaves 1,396 a month" in printed and "<- the knee, 90% of all, most money" in printed
    assert "Money is saved only where GPUs are given back." in printed


def test_hits_of_the_device_alone_are_no_savings_of_the_host(plan_ten):
    rows, printed = plan_ten("--device-capacity", "64GiB")
    assert {row["lru"] for row in rows[1:]} == {"0.0%"} and {row["GPUs"] for row in rows} == {"0.22"}
    assert "No size of host memory saves prefill of this load." in printed and "<-" not in printed
    assert (
        "The device alone has 80.0% of the tokens of prompts, and the most that any host memory adds is 0.0%" in printed
    )


def test_an_engine_of_several_gpus_keeps_all_of_them_busy(on_load):
    options = [*WITH_DEVICE, *FEW_REQUESTS, "--policy", "lru"]
    [one, four] = [saved(on_load("plan", *options, "--tp", tp))[0]["GPUs"] for tp in ("1", "4")]
    assert float(four) == pytest.approx(4 * float(one), abs=0.05)


def test_assumptions_about_a_gpu_are_printed_and_options_replace_them(on_load):
    printed = on_load("plan", "--gpu", "h200", "--tp", "4", *FEW_REQUESTS, "--policy", "lru")
    assert (
        "at 2,492 TFLOPS" in printed
        and "assumed of 4 x h200: 63% of 3,956 TFLOPS, loads at 216 GB/s, 282 GB of KV" in printed
    )
    given = on_load("plan", "--gpu", "h200", *WITH_DEVICE, *FEW_REQUESTS, "--policy", "lru")
    assert "assumed of" not in given and "prefill at the beginning of a prompt: 1,000 tokens/s (given)" in given


def test_sizes_too_large_for_the_tier_have_no_value_above_it(on_load):
    rows = saved(on_load("plan", *WITH_DEVICE, *FEW_REQUESTS, "--below", "1TiB", "--policy", "lru"))
    assert [row["lru + tier"] == "-" for row in rows] == [True, False, False, False, False, True, True, True]


def test_a_model_whose_kv_is_not_bf16_has_no_coded_curve_and_a_reason(on_load):
    options = [*WITH_DEVICE, *FEW_REQUESTS, "--policy", "lru"]
    printed = on_load("plan", *options, "--kv-dtype", "fp8")
    assert "no curve of coded blocks: codec" in printed and "+ coded" not in printed
    assert "no curve of coded blocks" not in on_load("plan", *options, "--codec", "none")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ((), "give --gpu \\(a100, "),
        (("--gpu", "h200", "--gib-price", "8"), "--gib-price is compared with what GPUs cost: give --gpu-price"),
        (RATES, "how much KV the device keeps, is not known: give --gpu \\(a100, .* and --device-capacity"),
        (("--gpu", "h100x"), "unknown GPU 'h100x'; known are a100, .*; of another one give --tflops, --host-rate"),
        (("--gpu", "h200", "--limit", "1"), "all requests of this trace have the same time"),
        (("--gpu", "h200", "--sizes", "64GiB:100GiB"), "first and the last of 2 to 16 sizes, .* such as 64GiB:4TiB"),
        (("--gpu", "h200", "--sizes", "0:1TiB"), "first and the last of 2 to 16 sizes"),
        (("--gpu", "h200", "--sizes", "64:4TiB"), "first and the last of 2 to 16 sizes"),
        (("--gpu", "h200", "--sizes", "many"), "a size is a number of bytes such as 64GiB"),
        (("--gpu", "h200", "--sizes", "1GiB:4GiB"), "1.0 GiB, is less than the 8.0 GiB .* begin --sizes at 8.0GiB"),
        (("--gpu", "h200", "--tokenizer", "."), "--tokenizer is for logs, and a trace has no texts"),
        (("--gpu", "h200", "--json", "no/such/folder/plan"), "--json cannot be written to no/such/folder"),
        (("--gpu", "h200", "--html", "no/such/folder/plan.html"), "--html cannot be written to no/such/folder"),
        (("--gpu", "h200", "--html", "."), "--html cannot be written to ., which is a folder"),
        (("--gpu", "h200", "--policy", "min"), "unknown policy 'min'"),
        (("--gpu", "h200", "--tp", "3"), "3 ranks cannot share its 4 KV heads"),
        (("--gpu", "h200", "--below", "1GiB"), "1GiB is less than a block"),
    ],
    ids=str,
)
def test_errors_are_one_sentence(tmp_path, run, options, complaint):
    trace = write(tmp_path / "trace.jsonl", mooncake_lines(TEN))
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    code, printed = run("plan", trace, "--model", str(tmp_path / "config.json"), *options)
    assert code == 2 and re.search(complaint, printed) and printed.count("\n") == 1


HYBRID = MODEL | {"num_hidden_layers": 48, "head_dim": 128, "intermediate_size": 1024}
HYBRIDS = {
    "windows": HYBRID | {"model_type": "gemma3", "sliding_window": 1024},
    "local chunks": HYBRID | {"model_type": "llama4", "attention_chunk_size": 2048},
    "states": HYBRID
    | {
        "model_type": "qwen3_next",
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
    },
    "full attention": HYBRID,
    "a latent": HYBRID | {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64},
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_plan_is_made_of_each_kind_of_model(tmp_path, on_load, name):
    (tmp_path / "hybrid.json").write_text(json.dumps(HYBRIDS[name]))
    rates = ["--prefill-rate", "1000", "--host-rate", "40", "--device-capacity", "3GiB", "--below", "64GiB"]
    options = [*rates, "--policy", "lru", "--sizes", "1GiB:32GiB"]
    printed = on_load("plan", *options, weight=["--model", str(tmp_path / "hybrid.json")])
    rows = saved(printed)
    assert {"lru", "lru + coded", "lru + tier"} < rows[0].keys() and len(rows) == 7
    shares = [[float(row[way].rstrip("%")) for row in rows[1:]] for way in ("lru", "lru + coded")]
    assert shares[0] == sorted(shares[0]) and shares[0][-1] >= 10
    has_checkpoints = name not in ("full attention", "a latent")
    assert ("needs no checkpoints to resume" in printed) is not has_checkpoints


def test_loads_take_the_time_of_checkpoints_too(tmp_path, run):
    """Eight loads of a block and a state each, at two rates."""
    trace, model, out = write(tmp_path / "ten", mooncake_lines(TEN)), tmp_path / "states.json", tmp_path / "out.json"
    model.write_text(json.dumps(HYBRIDS["states"]))
    options = ["--model", str(model), "--prefill-rate", "1", "--device-capacity", "96MiB", "--sizes", "8GiB:16GiB"]
    saved_at = {}
    for rate in (1, 2):
        code, printed = run("plan", trace, "--policy", "lru", *options, "--host-rate", str(rate), "--json", str(out))
        assert code == 0, printed
        saved_at[rate] = json.loads(out.read_text())["results"][0]["points"][-1]["prefill_seconds_saved"]
    token, checkpoint = re.search(r"token takes ([\d,]+) bytes .*, a checkpoint ([\d.]+) MiB", printed).groups()
    each = 512 * int(token.replace(",", "")) + float(checkpoint) * 2**20
    assert saved_at[2] - saved_at[1] == pytest.approx(8 * each / 1e9 / 2, rel=0.05)


def test_a_device_holds_as_many_raw_chunks_beside_a_coded_host(tmp_path):
    (tmp_path / "states.json").write_text(json.dumps(HYBRIDS["states"]))
    trace = write(tmp_path / "ten", mooncake_lines(TEN))
    options = ["--model", str(tmp_path / "states.json"), "--prefill-rate", "1", "--device-capacity", "8GiB"]
    args = parser().parse_args(["plan", trace, *options])
    load, sizes = recorded(args)[0], sizes_of(args.sizes)
    raw, (other, _) = Setting.of(args, load, sizes), coded(args, load, sizes)
    held = [each.device.capacity / each.planner.host_blocks_per_chunk for each in (raw, other)]
    assert held[0] == pytest.approx(held[1], rel=0.02) and other.block_bytes != raw.block_bytes


def test_memory_without_limit_saves_what_a_size_without_evictions_saves(on_load, tmp_path):
    out = tmp_path / "plan.json"
    found = []
    for sizes in ("64GiB:128GiB", "64GiB:64TiB"):
        on_load("plan", *WITH_DEVICE, *FEW_REQUESTS, "--policy", "lru", "--sizes", sizes, "--json", str(out))
        written = json.loads(out.read_text())
        found.append((written["prefill_share_saved_without_limit"], written["results"][0]["points"][-1]))
    (without, small), (also, large) = found
    assert without == also == large["prefill_share_saved"] > small["prefill_share_saved"]


def test_a_size_that_evicts_a_little_is_no_end_of_the_curve():
    trace = trace_of(random_prompts(3, 200, "abc", 6))
    tiers = replays.Tiers(DeviceTier(8), None, None, None)
    most = trace.different_blocks
    few, none, more = outcomes_by_size(trace, "lru", [most - 3, most, most + 9], tiers)
    assert 0 < few.tally.evictions < 9 and few.tally != none.tally == more.tally
    assert none.tally == replays.replayed(trace, HostTier(most), tiers).tally and not none.tally.evictions


def test_a_model_is_known_by_its_name(on_load):
    printed = on_load("plan", "--gpu", "h100", "--policy", "lru", "--limit", "40", weight=["--model", "gemma-3-12b"])
    assert "KV of a token takes 65,536 bytes on all ranks together, a checkpoint 320.0 MiB" in printed


def test_a_larger_smallest_size_is_named_where_a_block_is_larger_than_it(on_load, tmp_path, run):
    (tmp_path / "large.json").write_text(json.dumps(MODEL | {"num_hidden_layers": 2**17}))
    trace = write(tmp_path / "ten.jsonl", mooncake_lines(TEN))
    code, printed = run("plan", trace, "--model", str(tmp_path / "large.json"), "--gpu", "h200")
    assert code == 2 and "64.0 GiB, is less than the 128.0 GiB" in printed and "at 128.0GiB" in printed


def test_results_are_written(planned):
    printed, written = planned
    rows = saved(printed)
    assert (written["schema_version"], written["command"], written["block_bytes"]) == (1, "plan", BLOCK_GIB << 30)
    assert written["sentences"] == printed.splitlines()[-3:]
    for curve in written["results"]:
        name = " + ".join(filter(None, (curve["policy"], curve["variant"])))
        assert [f"{point['prefill_share_saved']:.1%}" for point in curve["points"]] == [row[name] for row in rows[1:]]
        if name == written["preferred"]:
            assert [f"{point['gpus']:.2f}" for point in curve["points"]] == [row["GPUs"] for row in rows[1:]]
    [knee] = [at for at, line in enumerate(lines_of(printed, "prefill time saved")) if "the knee" in line]
    assert written["knee_bytes"] == GIB_SIZES[knee - 2] << 30
    assert written["tokens_by_origin"]["no host"]["host"] == 0 < written["tokens_by_origin"]["4 TiB"]["host"]


# What was recorded


def test_a_log_of_token_ids_is_read_as_convert_reads_it(tmp_path, run):
    lines = [{"timestamp": 60.0 * at, "body": {"prompt": list(range(16 * (at % 3 + 1)))}} for at in range(20)]
    log, trace, kept = write(tmp_path / "server.log", lines), str(tmp_path / "trace"), str(tmp_path / "plan.json")
    assert run("convert", log, "--out", trace)[0] == 0
    options = ["--model", "qwen3-8b", "--gpu", "h200", "--policy", "lru", "--json", kept]
    found = []
    for path in (log, trace):
        code, printed = run("plan", path, *options)
        assert code == 0, printed
        found.append({**json.loads(Path(kept).read_text()), "traces": []})
        assert ("20 requests of 624 tokens, 39 whole blocks of 16 tokens" in printed) is (path == log)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no requests"),
        ("time,input,output\n1,2,3\n", "it looks like CSV: JSON lines are needed"),
        ("INFO: started\nINFO: ended\n", "has no requests; docs/traces.md lists the traces and logs"),
        (
            '{"timestamp": 1, "messages": [{"role": "user", "content": "hi"}]}\n',
            "give the model's folder by --tokenizer",
        ),
        ('{"timestamp": 1, "input_length": 512, "output_length": 3}\n', "text_input; docs/traces.md lists"),
        ('{"timestamp": 1, "input_length": 9, "hash_ids": []}\n', "no request has a whole block"),
    ],
    ids=["empty", "CSV", "no requests", "texts", "lengths", "no blocks"],
)
def test_files_of_which_no_plan_can_be_made_end_in_a_sentence(tmp_path, run, text, complaint):
    (tmp_path / "recorded").write_text(text)
    code, printed = run("plan", str(tmp_path / "recorded"), "--model", "qwen3-8b", "--gpu", "h200")
    assert code == 2 and complaint in printed and printed.count("\n") == 1, printed


def test_a_file_that_is_not_there_and_files_of_two_kinds_are_refused(tmp_path, run):
    trace, log = write(tmp_path / "trace", mooncake_lines(TEN)), write(tmp_path / "log", [{"prompt": [1] * 20}])
    code, printed = run("plan", "no/such/file", "--model", "qwen3-8b", "--gpu", "h200")
    assert code == 2 and "no/such/file cannot be read" in printed
    code, printed = run("plan", trace, log, "--model", "qwen3-8b", "--gpu", "h200")
    assert code == 2 and f"{trace} is a trace and {log} is none" in printed


def readme_line():
    [line] = re.findall(r"^cpu-prefix-cache (plan .+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    return shlex.split(line)


def test_the_line_of_the_readme_runs_as_printed(monkeypatch, tmp_path, run):
    """With fewer requests, and a page."""
    monkeypatch.chdir(ROOT)
    code, printed = run(*readme_line(), "--limit", "100", "--html", str(tmp_path / "plan.html"))
    assert code == 0 and "100 requests from examples/plan/synthetic.jsonl.gz" in printed
    page = (tmp_path / "plan.html").read_text()
    assert all(sentence in page for sentence in printed.splitlines()[-3:])


@pytest.mark.slow
def test_the_line_of_the_readme_prints_what_the_page_about_sizes_shows(monkeypatch, tmp_path, run):
    """There it has a price and a page, too. Some 20 s."""
    [command, *shown] = re.search(r"```\n\$ cpu-prefix-cache (plan .+?)\n```", PAGE.read_text(), re.DOTALL)[
        1
    ].splitlines()
    monkeypatch.chdir(ROOT)
    arguments = shlex.split(command.replace("plan.html", str(tmp_path / "plan.html")))
    code, printed = run(*arguments)
    assert code == 0 and arguments[: len(readme_line())] == readme_line()
    assert [line for line in shown if line not in ("...", *printed.splitlines())] == []


def test_the_bundled_trace_is_what_the_script_makes():
    bundled = ROOT / "examples" / "plan" / "synthetic.jsonl.gz"
    assert gzip.decompress(bundled.read_bytes()).decode() == make_trace.lines()
    assert bundled.stat().st_size < 200_000
    assert next(make_trace.requests()) != next(make_trace.requests(make_trace.SEED + 1))
