"""Memory that models keep on the host: pieces, waste, and the bytes of a conversation that can be resumed.

Each model is a list of groups: 16-bit KV unless stated otherwise, with blocks as vLLM chooses them. The numbers of
layers, heads and dimensions are those in the `config.json` of the published checkpoint.

    python -m benchmarks.deciding.hybrid_models       # results/hybrid_models.txt: each model, and two tables
"""

from dataclasses import dataclass

from cpu_prefix_cache.deciding import ChunkLocalGroup, Group, HybridChunkPlanner, PrefixGroup, StateGroup, WindowGroup
from cpu_prefix_cache.model.planner import FAR_CHUNKS
from cpu_prefix_cache.model.report import conversation_bytes, describe, everything_bytes, group_waste

KIB, MIB = 2**10, 2**20

# The conversation of the second table: each turn adds 3,584 tokens of a prompt and 512 of an answer.
TURNS = 8
PROMPT = 3_584
ANSWER = 512


@dataclass(frozen=True)
class Model:
    name: str
    groups: list[Group]
    max_model_len: int
    ranks: int = 1

    def planner(self) -> HybridChunkPlanner:
        return HybridChunkPlanner(self.groups, max_model_len=self.max_model_len, ranks=self.ranks)


def attention(layers: int, heads: int, dim: int, tokens: int) -> int:
    """Bytes of one block of K and V, 16 bits each."""
    return 2 * layers * heads * dim * 2 * tokens


def full(block_bytes: int, tokens: int = 16, name: str = "full", **options) -> Group:
    return PrefixGroup(name=name, block_tokens=tokens, block_bytes=block_bytes, **options)


def window(block_bytes: int, sees: int, tokens: int = 16, name: str = "window", **options) -> Group:
    return WindowGroup(
        name=name,
        block_tokens=tokens,
        block_bytes=block_bytes,
        window_tokens=sees,
        **options,
    )


def state(page_bytes: int, tokens: int) -> Group:
    return StateGroup(name="state", block_tokens=tokens, block_bytes=page_bytes)


def delta_net(layers: int, state_bytes: int) -> int:
    """A page of gated delta net with 16 key and 32 value heads of 128, and a convolution over 4 tokens."""
    convolution = (2 * 16 * 128 + 32 * 128) * 3 * 2  # q, k and v of the last 3 tokens; 16 bits
    recurrent = 32 * 128 * 128 * state_bytes
    return layers * (convolution + recurrent)


def mamba2(layers: int) -> int:
    """A page of Mamba 2 with 128 heads of 64, a state of 128, 1 group, and a convolution over 4 tokens; 16 bits."""
    convolution = (128 * 64 + 2 * 1 * 128) * 3 * 2
    recurrent = 128 * 64 * 128 * 2
    return layers * (convolution + recurrent)


def aligned(num_bytes: int) -> int:
    """DeepSeek-V4's pages are padded to 576 bytes (vLLM issue 54703, where all four groups' page sizes are listed)."""
    return -(-num_bytes // 576) * 576


# Llama-3.1-8B: 32 layers, 8 KV heads of 128.
LLAMA_8B = full(attention(32, 8, 128, 16))

# gpt-oss-20b: 24 layers, every second with a window of 128; 8 KV heads of 64.
GPT_OSS = [full(attention(12, 8, 64, 16)), window(attention(12, 8, 64, 16), sees=128)]
GPT_OSS_TP2 = [full(attention(12, 4, 64, 16)), window(attention(12, 4, 64, 16), sees=128)]

# Gemma 3: five layers of six have a window of 1,024. 4B: 34 layers, 4 KV heads of 256. 27B: 62 layers, 16 of 128.
GEMMA_4B = [full(attention(5, 4, 256, 16)), window(attention(29, 4, 256, 16), sees=1_024)]
GEMMA_27B = [full(attention(10, 16, 128, 16)), window(attention(52, 16, 128, 16), sees=1_024)]

# The same in vLLM's groups, which have equal block sizes: a block table for at most five layers.
GEMMA_4B_SPLIT = [full(attention(5, 4, 256, 16))] + [
    window(attention(layers, 4, 256, 16), sees=1_024, name=f"window {at}")
    for at, layers in enumerate([5, 5, 5, 5, 5, 4])
]

# Llama-4-Scout: 48 layers, three of four attend within local chunks of 8,192; 8 KV heads of 128.
LLAMA_4 = [
    full(attention(12, 8, 128, 16)),
    ChunkLocalGroup(
        name="local",
        block_tokens=16,
        block_bytes=attention(36, 8, 128, 16),
        window_tokens=8_192,
    ),
]

# Where there are states, vLLM raises the block of attention, in steps of 16, until a layer's block holds a layer's
# page. Qwen3-Next-80B-A3B: 48 layers, 12 of them full attention, 2 KV heads of 256; a page of 1,097,728 bytes wants
# 536 tokens of 2,048 bytes, hence 544; with states in float32 it is 2,146,304, 1,048 and 1,056.
QWEN_NEXT = [full(attention(12, 2, 256, 544), 544), state(delta_net(36, 2), 544)]
QWEN_NEXT_32 = [full(attention(12, 2, 256, 1_056), 1_056), state(delta_net(36, 4), 1_056)]

# Qwen3.5-35B-A3B: 40 layers, 10 of them full attention; heads and states as above, `mamba_ssm_dtype` float32.
QWEN_35 = [full(attention(10, 2, 256, 1_056), 1_056), state(delta_net(30, 4), 1_056)]

# Bamba-9B: 32 layers, attention in 9, 18 and 27 only, 8 KV heads of 128; 2,147,840 bytes want 525 tokens of 4,096.
BAMBA = [full(attention(3, 8, 128, 528), 528), state(mamba2(29), 528)]

# DeepSeek-V3: 61 layers of MLA, 512 latent and 64 rotary values a token, the same on every rank; 64-token blocks.
DEEPSEEK_V3 = [full(61 * (512 + 64) * 2 * 64, 64, name="mla", lanes=1)]

# DeepSeek-V4-Flash, fp8: 43 layers, of which 21 compress 4 tokens into one (each with an indexer) and 20 compress 128;
# all have a window of 128. A compressed token takes 584 bytes (448 fp8 + 64 rotary in 16 bits + 8 scales), an indexer's
# 132. A compressor keeps the tokens it has not compressed yet, in float32: 8 of them at a rate of 4, with two halves of
# 512 values and of an indexer's 128, and 128 at a rate of 128. In bytes, the four groups of vLLM issue 54703.
V4_COMPRESSED = 21 * aligned(64 * 584) + 20 * aligned(2 * 584) + 21 * aligned(64 * 132)
V4_STATE_4 = 21 * (aligned(4 * 2 * 512 * 2 * 4) + aligned(4 * 2 * 128 * 2 * 4))
V4_STATE_128 = 20 * aligned(8 * 512 * 2 * 4)
DEEPSEEK_V4 = [
    full(V4_COMPRESSED, 256, name="compressed"),
    window(43 * aligned(64 * 584), sees=128, tokens=64),
    window(V4_STATE_128, sees=128, tokens=8, name="state of 128"),
    window(V4_STATE_4, sees=8, tokens=4, name="state of 4"),
]

# Context parallelism 2: a block holds 16 tokens on each of 2 ranks, so it covers 32.
LLAMA_8B_CP2 = full(attention(32, 8, 128, 16), tokens=32)

# Llama-3.2-1B drafts: 16 layers, 8 KV heads of 64.
DRAFT = full(attention(16, 8, 64, 32), tokens=32, name="draft")

MODELS = [
    Model("Llama-3.1-8B", [LLAMA_8B], 131_072),
    Model("gpt-oss-20b", GPT_OSS, 131_072),
    Model("gpt-oss-20b, TP2", GPT_OSS_TP2, 131_072, ranks=2),
    Model("Gemma3-4B", GEMMA_4B, 131_072),
    Model("Gemma3-4B, as vLLM", GEMMA_4B_SPLIT, 131_072),
    Model("Gemma3-27B", GEMMA_27B, 131_072),
    Model("Llama-4-Scout", LLAMA_4, 1_048_576),
    Model("Qwen3-Next", QWEN_NEXT, 262_144),
    Model("Qwen3-Next, fp32 state", QWEN_NEXT_32, 262_144),
    Model("Qwen3.5-35B-A3B", QWEN_35, 262_144),
    Model("Bamba-9B", BAMBA, 262_144),
    Model("DeepSeek-V3, TP8", DEEPSEEK_V3, 163_840, ranks=8),
    Model("DeepSeek-V4-Flash", DEEPSEEK_V4, 1_048_576),
    Model("Llama-3.1-8B, CP2", [LLAMA_8B_CP2], 131_072, ranks=2),
    Model("Llama-3.1-8B + 1B", [LLAMA_8B, DRAFT], 131_072),
]


def waste_table() -> str:
    """Table of what each group keeps, and how much of its host memory is unused."""
    lines = [
        "| model | grid | group | kind | piece, KiB | host blocks | kept | waste |",
        "|---|--:|---|---|--:|--:|--:|--:|",
    ]
    for model in MODELS:
        planner = model.planner()
        far = planner.checkpoint(FAR_CHUNKS)
        lines += [
            f"| {model.name if at == 0 else ''} | {planner.grid_tokens if at == 0 else ''} | {piece.group.name} "
            f"| {piece.group.kind} | {piece.num_bytes / KIB:,.0f} "
            f"| {piece.host_blocks} x {planner.lane_bytes / KIB:,.1f} KiB "
            f"| {'1 a chunk' if piece.in_chunk else f'{sum(each.group == at for each in far)} a checkpoint'} "
            f"| {group_waste(planner, at):.1%} |"
            for at, piece in enumerate(planner.pieces)
        ]
    return "\n".join(lines)


def conversation_table() -> str:
    """Host memory on all ranks for the conversation, resumable at its end, or at the beginning and end of each turn."""
    lines = [
        "| model | prefix KV, KiB a token | checkpoint, MiB | 1 checkpoint, MiB | 16 checkpoints, MiB "
        "| everything, MiB | everything / 16 |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for model in MODELS:
        planner = model.planner()
        tokens = TURNS * (PROMPT + ANSWER)
        turns = conversation_depths(planner)
        one, many = (conversation_bytes(planner, tokens, depths) for depths in ([turns[-1]], turns))
        everything = everything_bytes(planner, tokens)
        lines.append(
            f"| {model.name} | {token_bytes(planner) / KIB:,.1f} | {checkpoint_bytes(planner, turns[-1]) / MIB:,.1f} "
            f"| {one / MIB:,.0f} | {many / MIB:,.0f} | {everything / MIB:,.0f} | {everything / many:.1f}x |"
        )
    return "\n".join(lines)


def conversation_depths(planner: HybridChunkPlanner) -> list[int]:
    """The depths, in chunks, of the conversation's checkpoints: at the end of each prompt and of each answer."""
    starts = range(0, TURNS * (PROMPT + ANSWER), PROMPT + ANSWER)
    return [planner.hittable_chunks(start + tokens) for start in starts for tokens in (PROMPT, PROMPT + ANSWER)]


def token_bytes(planner: HybridChunkPlanner) -> float:
    """Bytes of the prefix groups' KV of one token, over all ranks."""
    return sum(piece.num_bytes * piece.lanes for piece in planner.pieces if piece.in_chunk) / planner.grid_tokens


def checkpoint_bytes(planner: HybridChunkPlanner, depth: int) -> int:
    """Bytes of a checkpoint after `depth` chunks, over all ranks."""
    kept = [planner.pieces[at.group] for at in planner.checkpoint(depth)]
    return sum(piece.num_bytes * piece.lanes for piece in kept)


def main() -> None:
    for model in MODELS:
        print(f"{model.name}\n{describe(model.planner())}\n")
    print(waste_table(), conversation_table(), sep="\n\n")


if __name__ == "__main__":
    main()
