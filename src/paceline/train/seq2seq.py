"""Seq2SeqTrainer: evaluation and prediction by generating, as in Hugging Face's class of the same name.

evaluate, predict(**settings of generate)
    prediction_step      generate, and the loss of the labels
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ArgumentError
from paceline.train.arguments import TrainingArguments, option
from paceline.train.evaluation import PredictionOutput, predict_batch
from paceline.train.trainer import Trainer


@dataclass(repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """TrainingArguments with what generating needs.

    Raises:
        ArgumentError: as for TrainingArguments, and for sortish_sampler.
    """

    sortish_sampler: bool = option(False, "Sort samples roughly by length.")
    predict_with_generate: bool = option(False, "Evaluate on what model.generate gives, not on the logits.")
    generation_max_length: int | None = option(
        None, "max_length of generate in evaluations (default: the model's generation config)."
    )
    generation_num_beams: int | None = option(
        None, "num_beams of generate in evaluations (default: the model's generation config)."
    )
    generation_config: str | None = option(
        None, "Folder or file of a generation config, or the object, that replaces the model's."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sortish_sampler:
            raise ArgumentError(
                "sortish_sampler=True is not supported by paceline: write train_sampling_strategy="
                "'group_by_length', which saves the same padding"
            )

    def to_dict(self) -> dict[str, Any]:
        """All fields by name; a generation config as a dict."""
        values = super().to_dict()
        if hasattr(values["generation_config"], "to_dict"):
            values["generation_config"] = values["generation_config"].to_dict()
        return values


class Seq2SeqTrainer(Trainer):
    """A Trainer whose evaluations generate, with ``predict_with_generate``.

    The constructor takes what Trainer's takes; args is a Seq2SeqTrainingArguments.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._gen_kwargs: dict[str, Any] = {}
        given: Any = getattr(self.args, "generation_config", None)
        if given is not None:
            self.model.generation_config = self.load_generation_config(given)

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> Any:
        """A generation config: a copy of an object, or read from a file or folder.

        Raises:
            ArgumentError: it contradicts itself, so that it could not be saved with the model.
        """
        loaded = copy.deepcopy(gen_config_arg)
        if isinstance(gen_config_arg, (str, Path)):
            place = Path(gen_config_arg)
            folder, name = (str(place.parent), place.name) if place.is_file() else (str(gen_config_arg), None)
            loaded = importlib.import_module("transformers").GenerationConfig.from_pretrained(folder, name)
        try:
            loaded.validate(strict=True)
        except ValueError as error:
            raise ArgumentError(f"generation_config={gen_config_arg!r} cannot work: {error}") from error
        return loaded

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Evaluate; `gen_kwargs` go to generate, before the arguments' generation_* fields."""
        self._gen_kwargs = self._with_defaults(gen_kwargs)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """Predict; `gen_kwargs` go to generate, before the arguments' generation_* fields."""
        self._gen_kwargs = self._with_defaults(gen_kwargs)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """Loss, generated tokens and labels of one batch; each may be None.

        Tokens and labels have shape (samples, max_length), filled up with the padding token.
        """
        args: Any = self.args
        if prediction_loss_only or not args.predict_with_generate:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        settings = self._with_defaults(gen_kwargs) if gen_kwargs else self._gen_kwargs
        tokens = self._filled_up(self._generate(inputs, settings), settings)
        labels = inputs.get("labels")
        if labels is None:
            return None, tokens, None
        loss, _, _ = predict_batch(self, model, inputs, True, ignore_keys)
        return loss, tokens, self._filled_up(labels.to(self.args.device), settings)

    def _with_defaults(self, gen_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        args: Any = self.args
        settings = {name: value for name, value in gen_kwargs.items() if value is not None}
        if args.generation_max_length is not None and "max_new_tokens" not in settings:
            settings.setdefault("max_length", args.generation_max_length)
        if args.generation_num_beams is not None:
            settings.setdefault("num_beams", args.generation_num_beams)
        return settings

    def _generate(self, inputs: Mapping[str, Any], settings: dict[str, Any]) -> Tensor:
        """What the model generates from the inputs, without the labels and what was made of them."""
        labels, decoder_inputs = inputs.get("labels"), inputs.get("decoder_input_ids")
        dropped = {"labels"}
        if labels is not None and decoder_inputs is not None and labels.shape == decoder_inputs.shape:
            dropped |= {"decoder_input_ids", "decoder_attention_mask"}
        kept = self._prepare_inputs({name: value for name, value in inputs.items() if name not in dropped})
        model: Any = self.model
        with torch.no_grad(), self.compute_loss_context_manager():
            tokens: Tensor = model.generate(**kept, **settings)
        return tokens

    def _filled_up(self, tokens: Tensor, settings: Mapping[str, Any]) -> Tensor:
        """Tokens of shape (samples, length) as (samples, max_length), if they are shorter."""
        longest = self._longest(settings)
        if tokens.shape[-1] >= longest:
            return tokens
        filled = tokens.new_full((len(tokens), longest), self._padding_token())
        filled[:, : tokens.shape[-1]] = tokens
        return filled

    def _longest(self, settings: Mapping[str, Any]) -> int:
        config: Any = self.model.generation_config
        for source in (settings, config.to_dict()):
            if source.get("max_new_tokens") is not None:
                return int(source["max_new_tokens"]) + 1
            if source.get("max_length") is not None:
                return int(source["max_length"])
        return 0

    def _padding_token(self) -> int:
        """The tokenizer's padding token, else its end token, else the model's padding token."""
        config: Any = getattr(self.model, "config", None)
        for owner, name in (
            (self.processing_class, "pad_token_id"),
            (self.processing_class, "eos_token_id"),
            (config, "pad_token_id"),
        ):
            token = getattr(owner, name, None)
            if token is not None:
                return int(token)
        raise ArgumentError(
            "generated tokens of different lengths need a padding token; set model.config.pad_token_id, or "
            "give the Trainer a processing_class that has pad_token_id"
        )
