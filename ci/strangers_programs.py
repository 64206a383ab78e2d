# SPDX-License-Identifier: Apache-2.0
"""The programs of ci/strangers.py: where each is from, its arguments, and what is expected of it."""

from __future__ import annotations

from dataclasses import dataclass

BOTH = ("passed", "passed")
NEITHER = ("refused", "refused")
TRAINER = "transformers:Trainer"


@dataclass(frozen=True)
class Program:
    """``source`` is "transformers" or "trl", a repository, or "trl package", what is installed. ``path`` is a file in
    it, or FILE::TEST. ``replaced`` is a class, module:class, before which ContextParallelMixin is put. ``expects`` is
    for cp 1 and cp 2. ``reason`` says why a program cannot be run. In ``arguments``, {home} is the local cache."""

    name: str
    source: str
    path: str
    replaced: str = TRAINER
    arguments: tuple[str, ...] = ()
    expects: tuple[str, str] = BOTH
    reason: str = ""
    known: str = ""  # why losses differ, for as long as they do; the lane passes meanwhile


LANGUAGE = "examples/pytorch/language-modeling/"
TINY = (
    "--output_dir=out", "--max_steps=4", "--logging_steps=1", "--learning_rate=3e-3", "--report_to=none",
    "--save_strategy=no", "--per_device_train_batch_size=4", "--use_cpu",
)  # fmt: skip
TEXT = ("--train_file={home}/text.txt", "--do_train", *TINY)
LLAMA = ("--model_name_or_path=stand-in/llama", "--dtype=float32")
BLOCK = "--block_size=64"
METRICS = "It loads a metric by a hub's name, and a metric is code, for which no stand-in is made."

EXAMPLES = (
    Program("run_clm", "transformers", f"{LANGUAGE}run_clm.py", arguments=(*LLAMA, BLOCK, *TEXT)),
    Program(
        "run_clm, gradient accumulation and checkpointing", "transformers", f"{LANGUAGE}run_clm.py",
        arguments=(*LLAMA, BLOCK, *TEXT, "--gradient_accumulation_steps=2", "--gradient_checkpointing"),
    ),
    Program(
        "run_clm, streaming", "transformers", f"{LANGUAGE}run_clm.py",
        arguments=(*LLAMA, BLOCK, *TEXT, "--streaming", "--max_train_samples=64"),
    ),
    Program(
        "run_clm, distilgpt2", "transformers", f"{LANGUAGE}run_clm.py", expects=NEITHER,
        arguments=("--model_name_or_path=distilbert/distilgpt2", BLOCK, *TEXT),
    ),
    Program(
        "run_clm, --do_eval", "transformers", f"{LANGUAGE}run_clm.py", arguments=(*LLAMA, BLOCK, *TEXT, "--do_eval"),
        reason=METRICS,
    ),
    Program(
        "run_fim", "transformers", f"{LANGUAGE}run_fim.py", arguments=(*LLAMA, BLOCK, *TEXT),
        reason="It fails by itself, before it makes a Trainer: it asks an Embedding for a mean.",
    ),
    Program(
        "run_clm_no_trainer", "transformers", f"{LANGUAGE}run_clm_no_trainer.py", expects=("passed", "refused"),
        reason="It fails by itself, before it trains: it asks accelerate for a DistributedType.TPU.",
        arguments=(
            "--model_name_or_path=stand-in/llama", "--train_file={home}/text.txt", "--validation_file={home}/text.txt",
            BLOCK, "--max_train_steps=4", "--output_dir=out",
        ),
    ),
    Program(
        "run_mlm, BERT", "transformers", f"{LANGUAGE}run_mlm.py", expects=NEITHER,
        arguments=("--model_name_or_path=google-bert/bert-base-uncased", "--max_seq_length=64", *TEXT),
    ),
    Program(
        "run_mlm, BERT without dropout", "transformers", f"{LANGUAGE}run_mlm.py", expects=NEITHER,
        arguments=("--model_name_or_path=stand-in/bert", "--max_seq_length=64", *TEXT),
    ),
    Program(
        "run_swag", "transformers", "examples/pytorch/multiple-choice/run_swag.py", expects=NEITHER,
        arguments=(
            "--model_name_or_path=stand-in/bert", "--train_file={home}/swag.json", "--do_train", *TINY
        ),
    ),
    Program(
        "examples of text-classification, token-classification, question-answering, translation, summarization",
        "transformers", "examples/pytorch", reason=METRICS,
    ),
    Program(
        "context_parallel.py", "transformers", "examples/pytorch/context_parallel.py",
        reason='It names "cuda" in its text.',
    ),
)  # fmt: skip

OF_TRAINER = "tests/trainer/test_trainer.py::TrainerIntegrationPrerunTest::"
TRANSFORMERS_TESTS = (
    Program(
        "test_trainer: gradient accumulation", "transformers",
        f"{OF_TRAINER}test_gradient_accumulation_loss_alignment_with_model_loss",
    ),
    Program(
        "test_trainer: number of input tokens", "transformers", f"{OF_TRAINER}test_include_num_input_tokens_seen",
        expects=NEITHER,
    ),
    Program(
        "test_trainer_seq2seq: all", "transformers", "tests/trainer/test_trainer_seq2seq.py",
        reason="Its models have an encoder, and it loads T5 and CNN/DailyMail by a hub's name.",
    ),
    Program(
        "test_trainer_fsdp, test_trainer_distributed", "transformers", "tests/trainer",
        reason="They start torchrun themselves, and ask for several accelerators.",
    ),
)  # fmt: skip

QWEN = ("--model_name_or_path=trl-internal-testing/tiny-Qwen2ForCausalLM-2.5", "--dtype=float32")
MAGI = "--attn_implementation=magi"


def zen(config: str) -> tuple[str, str]:
    return ("--dataset_name=trl-internal-testing/zen", f"--dataset_config={config}")


def script(
    name: str, file: str, kind: str, data: str, *more: str, expects: tuple[str, str] = NEITHER, reason: str = ""
) -> Program:
    arguments = (*QWEN, MAGI, *zen(data), *TINY, *more)
    return Program(name, "trl package", f"scripts/{file}.py", f"trl:{kind}", arguments, expects, reason)


SCRIPTS = (
    script("sft", "sft", "SFTTrainer", "standard_language_modeling", expects=BOTH),
    script("sft, packing", "sft", "SFTTrainer", "standard_language_modeling", "--packing", "--max_length=128",
           expects=BOTH),
    script("sft, packing by wrapping", "sft", "SFTTrainer", "standard_language_modeling", "--packing",
           "--packing_strategy=wrapped", "--max_length=64", expects=BOTH),
    script("sft, padding_free", "sft", "SFTTrainer", "standard_language_modeling", "--padding_free",
           "--max_length=None", expects=BOTH),
    script("sft, conversations", "sft", "SFTTrainer", "conversational_language_modeling", expects=BOTH),
    script("sft, prompts and completions", "sft", "SFTTrainer", "conversational_prompt_completion", expects=BOTH),
    script("sft, evaluation", "sft", "SFTTrainer", "standard_language_modeling", "--eval_strategy=steps",
           "--eval_steps=2", expects=BOTH),
    script("sft, streaming", "sft", "SFTTrainer", "standard_language_modeling", "--dataset_streaming", expects=BOTH),
    script("sft, loss_type dft", "sft", "SFTTrainer", "standard_language_modeling", "--loss_type=dft", expects=BOTH),
    script("sft, gpt-oss without balancing", "sft", "SFTTrainer", "standard_language_modeling",
           "--model_name_or_path=trl-internal-testing/tiny-GptOssForCausalLM", "--router_aux_loss_coef=0",
           expects=BOTH),
    script("sft, LoRA", "sft", "SFTTrainer", "standard_language_modeling", "--use_peft", expects=BOTH,
           reason="It needs peft, which the lock has not."),
    script("dpo", "dpo", "DPOTrainer", "standard_preference"),
    script("kto", "kto", "KTOTrainer", "standard_unpaired_preference"),
    script("reward", "reward", "RewardTrainer", "standard_implicit_prompt_preference"),
    script("grpo", "grpo", "GRPOTrainer", "standard_prompt_only", "--reward_funcs=think_format_reward",
           "--num_generations=2"),
    script("rloo", "rloo", "RLOOTrainer", "standard_prompt_only", "--reward_funcs=think_format_reward"),
    script("distillation", "distillation", "DistillationTrainer", "conversational_language_modeling",
           "--teacher_model_name_or_path=trl-internal-testing/tiny-Qwen2ForCausalLM-2.5"),
    script("vllm_serve", "vllm_serve", "SFTTrainer", "standard_prompt_only",
           reason="It serves a model by vLLM and trains nothing."),
)  # fmt: skip

OF_SFT = "tests/test_sft_trainer.py::TestSFTTrainer::"


def sft_test(test: str, expects: tuple[str, str] = BOTH, reason: str = "", known: str = "") -> Program:
    name = f"test_sft_trainer: {test.removeprefix('test_').replace('trl-internal-testing/', '')}"
    return Program(name, "trl", f"{OF_SFT}{test}", "trl:SFTTrainer", (), expects, reason, known)


BALANCE = "TRL adds the loss that balances experts, and a rank takes it over its own tokens; validate() warns of it."
TINY_OF_TRL = "trl-internal-testing/tiny-"
TRL_TESTS = (
    sft_test(f"test_train[{TINY_OF_TRL}Qwen2ForCausalLM-2.5]"),
    sft_test(f"test_train[{TINY_OF_TRL}GptOssForCausalLM]", known=BALANCE),
    sft_test(f"test_train[{TINY_OF_TRL}Lfm2ForCausalLM]"),
    sft_test("test_train_with_pretokenized_data"),
    sft_test("test_train_with_iterable_dataset"),
    sft_test("test_train_packing[bfd]"),
    sft_test("test_eval_packing", reason="It counts rows of a data set, and the stand-in has others."),
    sft_test("test_train_with_eval"),
    sft_test("test_train_with_compute_metrics", NEITHER),
    sft_test("test_train_padding_free", reason="It asks for a kernel by a hub's name."),
    sft_test("test_train_vlm", reason="Its models see images, and their processors are on a hub."),
    sft_test("test_train_peft_model", reason="It needs peft, which the lock has not."),
    Program("test_dpo_trainer: train", "trl", "tests/test_dpo_trainer.py::TestDPOTrainer::test_train",
            "trl:DPOTrainer", expects=NEITHER),
    Program("test_reward_trainer: train_model", "trl",
            "tests/test_reward_trainer.py::TestRewardTrainer::test_train_model", "trl:RewardTrainer", expects=NEITHER),
)  # fmt: skip

PROGRAMS = (*EXAMPLES, *TRANSFORMERS_TESTS, *SCRIPTS, *TRL_TESTS)
