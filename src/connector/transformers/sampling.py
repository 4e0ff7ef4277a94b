"""Which token comes next and where an answer ends: as `model.generate` decides it, through its own parts.

    settings    the caller's options, else their generation_config, else the model's, else transformers' defaults
    a token     logits -> LogitsProcessorList -> the most likely one, or a sample
    the end     max_new_tokens or max_length, eos_token_id, stop_strings, max_time, criteria of the caller

A setting that these parts do not carry out (beams, drafts, another cache, ...) is refused by its name. The lists are
built by the methods of GenerationMixin that `generate` itself calls, so that equal settings mean equal tokens.
"""

import copy
import difflib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from connector.transformers.prompts import padding_of
from cpu_prefix_cache import ConfigurationError

# Carried out by transformers' processors and criteria.
CARRIED_OUT = frozenset(
    {
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "top_h",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "repetition_penalty",
        "no_repeat_ngram_size",
        "bad_words_ids",
        "sequence_bias",
        "suppress_tokens",
        "begin_suppress_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "exponential_decay_length_penalty",
        "remove_invalid_values",
        "renormalize_logits",
        "watermarking_config",
        "max_new_tokens",
        "max_length",
        "min_new_tokens",
        "min_length",
        "max_time",
        "stop_strings",
        "eos_token_id",
    }
)
# These do not change the answer to one prompt.
WITHOUT_EFFECT = frozenset(
    {"bos_token_id", "pad_token_id", "decoder_start_token_id", "disable_compile", "transformers_version"}
)

# What `generate` takes beside its settings; here it is in the prompt.
INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "pixel_values"})


class SamplingSettings:
    """The settings of one call. Raises ConfigurationError for those that are not carried out.

    `seed`: each answer draws from a random generator of its own, seeded with it, and so repeats what `generate` answers
    after `torch.manual_seed(seed)`. Without it, from torch's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: object,
        given: GenerationConfig | None,
        options: Mapping[str, Any],
        *,
        seed: int | None,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        streamer: BaseStreamer | None,
    ) -> None:
        self._streamer = streamer
        self._generation: Any = model  # the methods of its GenerationMixin
        self._device = model.device
        self._seed = seed
        self._processors = LogitsProcessorList(logits_processor)
        self._criteria = StoppingCriteriaList(stopping_criteria)
        self._config = _merged(model, given, options)
        said = {**_said(model.generation_config), **_said(given), **options}
        # The limit in new tokens comes first; `generate` warns where both are given.
        self._default_max = self._config.max_new_tokens is not None or said.get("max_length") is None
        self._default_min = self._config.min_new_tokens is not None or said.get("min_length") is None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            self._tokenizer = tokenizer
        elif self._config.stop_strings is not None:
            raise ConfigurationError(
                "stop_strings need a tokenizer of transformers, whose vocabulary is known; give stopping_criteria, "
                "or a PreTrainedTokenizer"
            )

    @property
    def padding(self) -> int | None:
        return padding_of(self._config)

    def for_prompt(self, tokens: Sequence[int]) -> "TokenChooser":
        """Decisions for one prompt."""
        ids = torch.frombuffer(array("q", tokens), dtype=torch.int64)[None].to(
            self._device
        )  # 8 times as fast as tensor
        config = copy.copy(self._config)
        self._generation._prepare_special_tokens(config, device=ids.device, batch_size=1)
        config = self._generation._prepare_generated_length(
            config,
            self._default_max,
            self._default_min,
            model_input_name="input_ids",
            input_ids_length=len(tokens),
            inputs_tensor=ids,
        )
        processors = self._generation._get_logits_processor(
            config,
            input_ids_seq_length=len(tokens),
            encoder_input_ids=ids,
            logits_processor=self._processors,
            device=ids.device,
        )
        criteria = self._generation._get_stopping_criteria(config, self._criteria, tokenizer=self._tokenizer)
        random = None if self._seed is None else torch.Generator(ids.device).manual_seed(self._seed)
        return TokenChooser(
            ids, config.max_length, processors, criteria, self._streamer, samples=bool(config.do_sample), random=random
        )


class TokenChooser:
    """Chooses the tokens of one answer, and passes them to a streamer. `is_over` is true when it has ended."""

    def __init__(
        self,
        ids: torch.Tensor,
        max_length: int,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
        *,
        samples: bool,
        random: torch.Generator | None,
    ) -> None:
        self.max_new_tokens = max_length - ids.shape[1]
        self._prompt_tokens = ids.shape[1]
        self.ids = ids  # of the prompt and the answer, [1, tokens]
        self.is_over = False
        self._streamer = streamer
        self._process: Any = processors
        self._criteria: Any = criteria
        self._samples = samples
        self._random = random

    def begin(self) -> None:
        if self._streamer is not None:
            self._streamer.put(self.ids.cpu())

    def choose(self, logits: torch.Tensor) -> int:
        """The next token, by the `logits` of the last one, float32 [vocabulary]."""
        scores: torch.Tensor = self._process(self.ids, logits[None].clone())
        if self._samples:
            token = torch.multinomial(scores.softmax(dim=-1), 1, generator=self._random)[0]
        else:
            token = scores.argmax(dim=-1)
        self.ids = torch.cat([self.ids, token[None]], dim=-1)
        if self._streamer is not None:
            self._streamer.put(token.cpu())
        self.is_over = bool(self._criteria(self.ids, None))
        return int(token)

    @property
    def chosen(self) -> tuple[int, ...]:
        """The tokens of the answer."""
        return tuple(self.ids[0, self._prompt_tokens :].tolist())

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()


def check_configuration(model: Any) -> None:
    """Raise ConfigurationError for a model that does not generate, or not from a cache, and for settings that are in
    `model.config`. `generate` looks for them in every call, in .5 ms.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ConfigurationError(f"{name} has an encoder: this generator takes causal models, which have none")
    if not model.can_generate():
        raise ConfigurationError(f"{name} has no head to generate with: load it by AutoModelForCausalLM")
    if said := model.config._get_generation_parameters():
        raise ConfigurationError(
            f"model.config says {', '.join(said)}, which transformers does not read there: set it in "
            "model.generation_config"
        )
    if model.generation_config.use_cache is False:
        raise ConfigurationError(
            f"the configuration of {name} says use_cache=False, and this generator is a cache: set "
            "model.generation_config.use_cache = True"
        )


def _said(config: GenerationConfig | None) -> dict[str, Any]:
    """The settings of `config` that are not left to others."""
    settings = {} if config is None else vars(config)
    return {name: value for name, value in settings.items() if value is not None and not name.startswith("_")}


def _merged(model: Any, given: GenerationConfig | None, options: Mapping[str, Any]) -> GenerationConfig:
    """All settings. Raises ConfigurationError for those that are not carried out, or not accepted by transformers."""
    try:
        config, unknown = model._prepare_generation_config(GenerationConfig() if given is None else given)
        unknown |= config.update(**options)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    if not INPUTS.isdisjoint(unknown):
        raise ConfigurationError(
            f"{', '.join(sorted(INPUTS & set(unknown)))} belong to the prompt: give a tokenizer's output as one "
            "argument, answer(tokenizer(text)) instead of answer(**tokenizer(text))"
        )
    if unknown:
        raise ConfigurationError(f"there is no setting {', '.join(map(_with_a_guess, unknown))}")
    defaults = config._get_default_generation_params()
    places = {"the options": options, "generation_config": _said(given)}
    refused = [
        f"{name}={value!r} in " + next((place for place in places if name in places[place]), "model.generation_config")
        for name, value in _said(config).items()
        if _is_refused(name, value, defaults)
    ]
    if refused:
        raise ConfigurationError(
            f"this generator samples one token after the other, and cannot carry out {', '.join(refused)}: leave it "
            "out there, or call model.generate"
        )
    return config


def _with_a_guess(name: str) -> str:
    """The unknown setting `name`, and the known one that may be meant."""
    known = sorted(each for each in vars(GenerationConfig()) if not each.startswith("_"))
    longer = sorted((each for each in known if each.startswith(name)), key=len)
    if guesses := longer or difflib.get_close_matches(name, known, n=1):
        return f"{name} (did you mean {guesses[0]}?)"
    return name


def _is_refused(name: str, value: object, defaults: Mapping[str, Any]) -> bool:
    if name in CARRIED_OUT | WITHOUT_EFFECT:
        return False
    default = defaults.get(name)
    return value != default and (default is not None or value is not False)
