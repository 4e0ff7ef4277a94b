"""Words and a chat template for tests of logs. A word is a token, and so is each role."""

WORDS = [*"abcdefghijkl", "<|user|>", "<|assistant|>", "<|tool|>", "1"]
TEMPLATE = (
    "{% if tools %}<|tool|> {{ tools | length }}\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'odd' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|{{ message.role }}|> {{ message.content }} {{ '<|tool|>' if message.tool_calls }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chat(*texts):
    """Messages of a user and an assistant in turn."""
    return [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 9, texts, strict=False)]
