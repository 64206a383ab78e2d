# SPDX-License-Identifier: Apache-2.0
"""Makes a local cache with tiny random models and data sets under names of the hub; ci/strangers.py calls it.

    python ci/strangers_cache.py FOLDER

FOLDER is what HF_HOME is set to. With HF_HUB_OFFLINE=1 a program that loads one of the names gets the stand-in. FOLDER
has text.txt and swag.json, too, for programs that take a file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HASH = "0" * 40  # of every snapshot and data set
ROWS = 17
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
OF_BERT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WORDS = (
    "A plan says which rank holds which rows . A mask says which token sees which . Rows travel once and sums come back"
).split()


def sentence(start: int, words: int = 9) -> str:
    return " ".join(WORDS[(start + 3 * i) % len(WORDS)] for i in range(words + start % 5))


def make_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator([sentence(i) for i in range(60)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", mask_token="<mask>",
        chat_template=TEMPLATE, model_max_length=512,
    )  # fmt: skip


def configs() -> dict:
    """Name on the hub -> (class of the Auto family, config)."""
    import transformers as t

    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    half = ["sliding_attention", "full_attention"]
    causal, of_trl = "AutoModelForCausalLM", "trl-internal-testing/tiny-"
    return {
        "stand-in/llama": (causal, t.LlamaConfig(**SIZES)),
        f"{of_trl}Qwen2ForCausalLM-2.5": (causal, t.Qwen2Config(**SIZES)),
        f"{of_trl}Qwen3MoeForCausalLM": (causal, t.Qwen3MoeConfig(**SIZES, **moe, head_dim=8)),
        f"{of_trl}Cohere2ForCausalLM": (causal, t.Cohere2Config(**SIZES, sliding_window=16, layer_types=half)),
        f"{of_trl}GptOssForCausalLM": (
            causal,
            t.GptOssConfig(
                **SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=16, layer_types=half
            ),
        ),
        f"{of_trl}Lfm2ForCausalLM": (causal, t.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])),
        f"{of_trl}Qwen2ForSequenceClassification-2.5": (
            "AutoModelForSequenceClassification",
            t.Qwen2Config(**SIZES, num_labels=1),
        ),
        "distilbert/distilgpt2": (causal, t.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=512)),
        "nickypro/tinyllama-15M": (causal, t.LlamaConfig(**SIZES)),
        "google-bert/bert-base-uncased": ("AutoModelForMaskedLM", t.BertConfig(**OF_BERT)),
        "stand-in/bert": (
            "AutoModelForMaskedLM",
            t.BertConfig(**OF_BERT, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0),
        ),
    }


def write_models(hub: Path) -> None:
    import torch
    import transformers

    tokenizer = make_tokenizer()
    for name, (auto, config) in configs().items():
        folder = hub / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(HASH)
        config.vocab_size = len(tokenizer)
        config.bos_token_id, config.eos_token_id = None, tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
        torch.manual_seed(0)
        model = getattr(transformers, auto).from_config(config, dtype=torch.float32)
        for key, parameter in model.named_parameters():
            if key.endswith("sinks"):  # they begin as whatever memory held
                torch.nn.init.normal_(parameter)
        snapshot = folder / "snapshots" / HASH
        model.save_pretrained(snapshot)
        tokenizer.save_pretrained(snapshot)


def zen() -> dict[str, list[dict]]:
    """Config -> rows, in the columns of TRL's own small data set."""
    made: dict[str, list[dict]] = {}
    for i in range(ROWS):
        asked, answer, worse = sentence(i, 4), sentence(i + 1), sentence(i + 2, 6)
        talk = [{"role": "user", "content": asked}]
        good, bad = ([{"role": "assistant", "content": text}] for text in (answer, worse))
        for name, row in {
            "standard_language_modeling": {"text": f"{asked} {answer}"},
            "conversational_language_modeling": {"messages": talk + good},
            "standard_prompt_completion": {"prompt": asked, "completion": f" {answer}"},
            "conversational_prompt_completion": {"prompt": talk, "completion": good},
            "standard_prompt_only": {"prompt": asked},
            "standard_preference": {"prompt": asked, "chosen": f" {answer}", "rejected": f" {worse}"},
            "standard_implicit_prompt_preference": {"chosen": f"{asked} {answer}", "rejected": f"{asked} {worse}"},
            "conversational_preference": {"prompt": talk, "chosen": good, "rejected": bad},
            "standard_unpaired_preference": {"prompt": asked, "completion": f" {answer}", "label": i % 2 == 0},
        }.items():
            made.setdefault(name, []).append(row)
    return made


def write_data_set(cache: Path, name: str, config: str, rows: list[dict], splits: tuple[str, ...]) -> None:
    import datasets

    class Rows(datasets.GeneratorBasedBuilder):
        def _info(self):
            return datasets.DatasetInfo(features=datasets.Dataset.from_list(rows).features)

        def _split_generators(self, manager):
            return [datasets.SplitGenerator(name=split, gen_kwargs={}) for split in splits]

        def _generate_examples(self):
            yield from enumerate(rows)

    own = name.rpartition("/")[2]
    Rows.BUILDER_CONFIGS = [datasets.BuilderConfig(name=config)]
    Rows(str(cache), dataset_name=own, config_name=config, hash=HASH, repo_id=name).download_and_prepare()


def write_data(home: Path) -> None:
    cache = home / "datasets"
    for config, rows in zen().items():
        write_data_set(cache, "trl-internal-testing/zen", config, rows, ("train", "test"))
    texts = [{"text": sentence(i, 16)} for i in range(100)]
    write_data_set(cache, "wikitext", "wikitext-2-raw-v1", texts, ("train", "validation"))
    (home / "text.txt").write_text("\n".join(row["text"] for row in texts) + "\n")
    answers = {f"ending{k}": sentence(k) for k in range(4)}
    swag = [{"sent1": sentence(i), "sent2": WORDS[i], **answers, "label": i % 4} for i in range(16)]
    (home / "swag.json").write_text("\n".join(map(json.dumps, swag)))


if __name__ == "__main__":
    write_models(Path(sys.argv[1]) / "hub")
    write_data(Path(sys.argv[1]))
