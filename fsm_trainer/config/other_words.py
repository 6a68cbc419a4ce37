"""What TRL, verl, prime-rl and AReno call a setting, and what it is called here; for the message about an unknown name.

Knows nothing of flags or files.
"""

from __future__ import annotations

import re

OTHER_WORDS = {
    # TRL's GRPOConfig and AsyncGRPOConfig, and transformers' TrainingArguments.
    "model": "{ckpt}",
    "model_name_or_path": "{ckpt}",
    "dataset_name": "{dataset_path}",
    "train_dataset": "{dataset_path}",
    "reward_funcs": "{reward_fn_path}",
    "num_generations": "{n_samples}",
    "per_device_train_batch_size": "{batch_size}, which counts prompts, and {mini_bs}, completions in one pass",
    "train_batch_size": "{batch_size}, which counts prompts",
    "generation_batch_size": "{batch_size}, which counts prompts",
    "steps_per_generation": "{batch_size}: a generated batch is one optimiser step",
    "max_prompt_length": "{max_prompt_tokens}",
    "max_completion_length": "{max_new_tokens}",
    "learning_rate": "{lr}",
    "lr_scheduler_type": "{lr_decay_style}",
    "warmup_steps": "{lr_warmup_steps}",
    "warmup_ratio": "{lr_warmup_steps}, a number of steps",
    "num_train_epochs": "{epochs}",
    "max_grad_norm": "{grad_clip_norm}",
    "optim": "{optimizer}",
    "beta": "{kl_coef}",
    "epsilon": "{clip_eps}",
    "epsilon_high": "{clip_eps_high}",
    "importance_sampling_level": "{algo} gspo or async-gspo for sequences",
    "loss_type": "{loss_aggregation}, and {algo} for dr-grpo and cispo",
    "scale_rewards": "{advantage_std}",
    "sync_ref_model": "{reference_refresh_steps}",
    "ref_model_sync_steps": "{reference_refresh_steps}",
    "vllm_importance_sampling_mode": "{offpolicy_correction}",
    "vllm_importance_sampling_correction": "{offpolicy_correction}",
    "vllm_importance_sampling_cap": "{correction_cap}",
    "vllm_importance_sampling_clip_max": "{correction_cap}",
    "bf16": "{dtype} bfloat16",
    "lora_r": "{lora_rank}",
    "use_vllm": "{rollout_engine}",
    "vllm_mode": "{rollout_host}: colocate is inline, server is server",
    "vllm_gpu_memory_utilization": "{rollout_gpu_memory_utilization}",
    "vllm_tensor_parallel_size": "{rollout_tp_size}",
    "vllm_max_model_length": "{max_prompt_tokens} and {max_new_tokens}, which make it",
    "vllm_enable_sleep_mode": "an engine beside the trainer keeps its memory: {rollout_gpu_memory_utilization} sets it",
    "vllm_server_base_url": "{rollout_base_url}",
    "vllm_server_host": "{rollout_base_url}, such as http://HOST:PORT",
    "vllm_server_port": "{rollout_base_url}, such as http://HOST:PORT",
    "vllm_server_timeout": "{start_timeout_s} and {rollout_timeout_s}",
    "save_steps": "{save_interval}",
    "metric_for_best_model": "{save_best}",
    "load_best_model_at_end": "{save_best}",
    "resume_from_checkpoint": "{resume}",
    "log_completions": "{log_samples}",
    "run_name": "{output_dir}: a run is called as its folder",
    "max_staleness": "{async_max_staleness}",
    "queue_maxsize": "{async_queue_size}, which counts prompt batches",
    "weight_sync_steps": "{async_sync_interval_steps}",
    "max_inflight_tasks": "{async_rollout_workers}, which counts batches",
    "request_timeout": "{rollout_timeout_s}",
    "peft_config": "{lora_rank}, {lora_alpha} and {lora_target_modules}",
    "mask_truncated_completions": "truncated completions are always trained on here",
    "rollout_func": "a rollout is one prompt and one completion here",
    "num_iterations": "a batch is always one optimiser step here",
    "logging_steps": "every step is logged here",
    "logging_dir": "{output_dir}, where metrics and log are written",
    # verl and prime-rl: the last part of a dotted name.
    "n": "{n_samples}",
    "rollouts_per_example": "{n_samples}",
    "clip_ratio": "{clip_eps}",
    "clip_ratio_low": "{clip_eps}",
    "clip_ratio_high": "{clip_eps_high}",
    "kl_loss_coef": "{kl_coef}",
    "kl_tau": "{kl_coef}",
    "entropy_coeff": "{entropy_coef}",
    "loss_agg_mode": "{loss_aggregation}",
    "ppo_micro_batch_size_per_gpu": "{mini_bs}",
    "max_response_length": "{max_new_tokens}",
    "max_tokens": "{max_new_tokens}",
    "total_epochs": "{epochs}",
    "total_training_steps": "{max_steps}",
    "save_freq": "{save_interval}",
    "gpu_memory_utilization": "{rollout_gpu_memory_utilization}",
    "tensor_model_parallel_size": "{rollout_tp_size}",
    "tensor_parallel_size": "{rollout_tp_size}",
    "max_model_len": "{max_prompt_tokens} and {max_new_tokens}, which make it",
    "enforce_eager": "{vllm_arg} enforce-eager=true",
    "engine_kwargs": "{vllm_arg} KEY=VALUE",
    "base_url": "{rollout_base_url}",
    "partial_rollout": "{async_sync_mode} inflight",
    "weight_sync_backend": "{policy_sync_transport}",
    "weight_sync_method": "{policy_sync_transport}",
    "weight_broadcast": "{policy_sync_transport}",
    "update_weights_bucket_megabytes": "{policy_sync_bucket_mb}",
    "max_async_level": "{async_max_staleness}",
    "staleness_threshold": "{async_max_staleness}, in optimiser steps",
    # AReno.
    "adam_8bit": "{optimizer} adamw-8bit",
    "activation_checkpointing": "{gradient_checkpointing}",
    "metrics_log_dir": "{report_to} tensorboard, which writes into the run's folder",
    "adam_4bit": "{optimizer} adamw-8bit",
    "greedy": "a group of equal completions teaches nothing; {temperature} is above 0",
    "ref_ckpt": "the reference is the model at the start, or refreshed by {reference_refresh_steps}",
    "reward_ckpt": "{reward_fn_path}: call a reward model in a function",
    "max_context_len": "{max_prompt_tokens} and {max_new_tokens}",
    "max_running_prompts": "the engine generates a whole batch at a time here",
    "drop_rollout_state": "this engine has no such state",
    "world_size": "the devices say it: {train_devices}",
}
"""Another system's name, in snake case -> ours: a setting in braces, with what differs."""
_EVALUATION = re.compile(r"(do_)?eval(_.*|uation.*)?|(val|test)_.*|per_device_eval_batch_size|.*_eval_.*")


def meaning_here(name: str) -> str | None:
    """What another system's setting is here, as in `OTHER_WORDS`; None if no system's name is known by it."""
    plain = name.lstrip("-").replace("-", "_").lower()
    plain = plain if plain in OTHER_WORDS else plain.rpartition(".")[2]
    if _EVALUATION.fullmatch(plain):
        return "this version evaluates nothing while it trains"
    return OTHER_WORDS.get(plain)
