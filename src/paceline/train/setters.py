"""Fields of TrainingArguments that are set together: one method for each group, with its usual defaults.

    args = TrainingArguments("runs/one").set_training(learning_rate=1e-4, batch_size=16).set_save(steps=100)

Names, parameters and defaults are Hugging Face's. Each method sets its whole group, returns the
arguments, and refuses at once what no field of the group can be; what contradicts another
group is refused when the Trainer is made.
"""

from __future__ import annotations

from typing import Any, TypeVar

from paceline.train import rules

Arguments = TypeVar("Arguments", bound="GroupSetters")


class GroupSetters:
    """The `set_...` methods of TrainingArguments.

    Each raises ArgumentError if a value cannot work, naming the field.
    """

    def set_training(
        self: Arguments,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0,
        num_epochs: float = 3,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        gradient_checkpointing: bool = False,
    ) -> Arguments:
        """What to train with and for how long; `batch_size` is that of one rank's micro-batch."""
        return self._set(
            do_train=True,
            learning_rate=learning_rate,
            per_device_train_batch_size=batch_size,
            weight_decay=weight_decay,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            seed=seed,
            gradient_checkpointing=gradient_checkpointing,
        )

    def set_evaluate(
        self: Arguments,
        strategy: str = "no",
        steps: float = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,
    ) -> Arguments:
        """When to evaluate; `delay` counts epochs or steps, as `strategy` does."""
        self._set(
            eval_strategy=strategy,
            eval_steps=steps,
            per_device_eval_batch_size=batch_size,
            eval_accumulation_steps=accumulation_steps,
            eval_delay=delay or 0,
            prediction_loss_only=loss_only,
        )
        rules.check_interval(self, "eval")  # type: ignore[arg-type]
        return self._set(do_eval=self.eval_strategy != "no")  # type: ignore[attr-defined]

    def set_testing(self: Arguments, batch_size: int = 8, loss_only: bool = False) -> Arguments:
        """How to predict on test data."""
        return self._set(
            do_predict=True, per_device_eval_batch_size=batch_size, prediction_loss_only=loss_only
        )

    def set_save(
        self: Arguments,
        strategy: str = "steps",
        steps: float = 500,
        total_limit: int | None = None,
        on_each_node: bool = False,
    ) -> Arguments:
        """When to save, and how many checkpoints to keep."""
        self._set(
            save_strategy=strategy,
            save_steps=steps,
            save_total_limit=total_limit,
            save_on_each_node=on_each_node,
        )
        rules.check_interval(self, "save")  # type: ignore[arg-type]
        return self

    def set_logging(
        self: Arguments,
        strategy: str = "steps",
        steps: float = 500,
        report_to: str | list[str] = "none",
        level: str = "passive",
        first_step: bool = False,
        nan_inf_filter: bool = False,
        on_each_node: bool = False,
        replica_level: str = "passive",
    ) -> Arguments:
        """When to log, where to, and what the ranks' loggers let through."""
        self._set(
            logging_strategy=strategy,
            logging_steps=steps,
            report_to=report_to,
            log_level=level,
            logging_first_step=first_step,
            logging_nan_inf_filter=nan_inf_filter,
            log_on_each_node=on_each_node,
            log_level_replica=replica_level,
        )
        rules.check_interval(self, "logging")  # type: ignore[arg-type]
        return self

    def set_push_to_hub(
        self: Arguments,
        model_id: str,
        strategy: str = "every_save",
        token: str | None = None,
        private_repo: bool | None = None,
        always_push: bool = False,
        revision: str | None = None,
    ) -> Arguments:
        """Uploading to the Hub is not served: raises ArgumentError."""
        return self._set(
            push_to_hub=True,
            hub_model_id=model_id,
            hub_strategy=strategy,
            hub_token=token,
            hub_private_repo=private_repo,
            hub_always_push=always_push,
            hub_revision=revision,
        )

    def set_optimizer(
        self: Arguments,
        name: str = "adamw_torch",
        learning_rate: float = 5e-5,
        weight_decay: float = 0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        args: str | None = None,
    ) -> Arguments:
        """The optimizer; `args` are more of its settings, as in 'momentum=0.9'."""
        return self._set(
            optim=name,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_epsilon=epsilon,
            optim_args=args,
        )

    def set_lr_scheduler(
        self: Arguments,
        name: str = "linear",
        num_epochs: float = 3.0,
        max_steps: int = -1,
        warmup_steps: float = 0,
    ) -> Arguments:
        """How the learning rate changes; `warmup_steps` below 1 is a share of all steps."""
        return self._set(
            lr_scheduler_type=name,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            warmup_steps=warmup_steps,
        )

    def set_dataloader(
        self: Arguments,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        in_order: bool = True,
        auto_find_batch_size: bool = False,
        ignore_data_skip: bool = False,
        sampler_seed: int | None = None,
    ) -> Arguments:
        """How data is loaded; the batch sizes are those of one rank's micro-batch."""
        return self._set(
            per_device_train_batch_size=train_batch_size,
            per_device_eval_batch_size=eval_batch_size,
            dataloader_drop_last=drop_last,
            dataloader_num_workers=num_workers,
            dataloader_pin_memory=pin_memory,
            dataloader_persistent_workers=persistent_workers,
            dataloader_prefetch_factor=prefetch_factor,
            dataloader_multiprocessing_context=multiprocessing_context,
            dataloader_in_order=in_order,
            auto_find_batch_size=auto_find_batch_size,
            ignore_data_skip=ignore_data_skip,
            data_seed=sampler_seed,
        )

    def _set(self: Arguments, **values: Any) -> Arguments:
        for name, value in values.items():
            setattr(self, name, value)
        rules.normalise(self)  # type: ignore[arg-type]
        rules.check_fields(self, values)  # type: ignore[arg-type]
        return self
