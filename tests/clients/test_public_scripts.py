"""The public example scripts of transformers on two ranks, given the import line and nothing else.

They are not part of this repository: PACELINE_CLIENT_SCRIPTS names a folder that holds them (run_clm.py,
run_mlm.py, run_glue.py, run_ner.py, run_qa.py with trainer_qa.py and utils_qa.py, run_translation.py). Models
are tiny and random, data is made here, nothing is fetched.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = os.environ.get("PACELINE_CLIENT_SCRIPTS")

pytestmark = [
    pytest.mark.suites,
    pytest.mark.timeout(400),
    pytest.mark.skipif(SCRIPTS is None, reason="PACELINE_CLIENT_SCRIPTS names no folder with the scripts"),
]

WORDS = ["the", "cat", "dog", "sat", "on", "mat", "red", "Paris", "London", "John", "Mary", "lives", "in"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>"]

METRIC = """
import datasets
import evaluate

class Own(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=datasets.Features({features}))

    def _compute(self, predictions, references, **settings):
        right = sum(p == r for p, r in zip(predictions, references))
        return {{name: right / len(predictions) for name in {names}}}
"""  # noqa: E501

NUMBERS = '{"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}'
TAGS = '{"predictions": datasets.Sequence(datasets.Value("string")), "references": datasets.Sequence(datasets.Value("string"))}'  # noqa: E501
TEXTS = '{"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))}'
ANSWERS = '{"predictions": {"id": datasets.Value("string"), "prediction_text": datasets.Value("string")}, "references": {"id": datasets.Value("string"), "answers": {"text": datasets.Sequence(datasets.Value("string")), "answer_start": datasets.Sequence(datasets.Value("int32"))}}}'  # noqa: E501

METRICS = {
    "accuracy": (NUMBERS, ["accuracy"]),
    "seqeval": (TAGS, ["overall_precision", "overall_recall", "overall_f1", "overall_accuracy"]),
    "sacrebleu": (TEXTS, ["score"]),
    "squad": (ANSWERS, ["exact_match", "f1"]),
}

# Script -> model, arguments, metrics that must be in all_results.json.
RUNS: dict[str, tuple[str, str, list[str]]] = {
    "run_clm": ("gpt2", "--train_file t.txt --validation_file v.txt --block_size 32", ["perplexity"]),
    "run_mlm": ("bert", "--train_file t.txt --validation_file v.txt --max_seq_length 32", ["perplexity"]),
    "run_glue": (
        "bert",
        "--train_file glue_t.json --validation_file glue_v.json --test_file glue_v.json --do_predict "
        "--eval_strategy steps --eval_steps 2 --load_best_model_at_end --metric_for_best_model accuracy",
        ["eval_accuracy"],
    ),
    "run_ner": (
        "bert",
        "--train_file ner_t.json --validation_file ner_v.json --test_file ner_v.json --do_predict",
        ["eval_f1", "predict_loss"],
    ),
    "run_qa": (
        "bert",
        "--train_file qa_t.json --validation_file qa_v.json --test_file qa_v.json --do_predict "
        "--max_seq_length 48 --doc_stride 16",
        ["eval_exact_match"],
    ),
    "run_translation": (
        "t5",
        "--source_lang en --target_lang ro --train_file tr_t.json --validation_file tr_v.json "
        "--test_file tr_v.json --do_predict --predict_with_generate --max_target_length 12",
        ["eval_bleu", "predict_loss"],
    ),
}


def sentence(length: int) -> str:
    return " ".join(random.choice(WORDS) for _ in range(length))


def question(number: int) -> dict[str, Any]:
    words = sentence(30).split()
    answer = {"text": [words[5]], "answer_start": [len(" ".join(words[:5])) + 1]}
    context = " ".join(words)
    return {"id": str(number), "title": "", "context": context, "question": sentence(5), "answers": answer}


def tag(word: str) -> str:
    return "B-LOC" if word in ("Paris", "London") else "B-PER" if word in ("John", "Mary") else "O"


def write_data(folder: Path) -> None:
    random.seed(0)
    for split, size in (("t", 61), ("v", 23)):
        sentences = [sentence(random.randint(4, 12)) for _ in range(size)]
        (folder / f"{split}.txt").write_text("\n".join(sentences))
        rows: dict[str, list[Any]] = {
            "glue": [{"sentence1": text, "label": number % 2} for number, text in enumerate(sentences)],
            "ner": [{"tokens": text.split(), "ner_tags": [*map(tag, text.split())]} for text in sentences],
            "tr": [{"translation": {"en": text, "ro": text[::-1]}} for text in sentences],
        }
        for name, entries in rows.items():
            (folder / f"{name}_{split}.json").write_text("\n".join(map(json.dumps, entries)))
        (folder / f"qa_{split}.json").write_text(json.dumps({"data": [question(i) for i in range(size)]}))
    for name, (features, names) in METRICS.items():
        (folder / name).mkdir()
        (folder / name / f"{name}.py").write_text(METRIC.format(features=features, names=names))


def write_models(folder: Path) -> None:
    import tokenizers as tk
    import transformers as tf

    backend = tk.Tokenizer(tk.models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = tk.pre_tokenizers.BertPreTokenizer(), tk.decoders.WordPiece()
    words = tk.trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL)
    backend.train_from_iterator([" ".join(WORDS)], words)
    pair = {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B:1 [SEP]:1"}
    backend.post_processor = tk.processors.TemplateProcessing(
        **pair, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", eos_token="</s>", model_max_length=64,
    )  # fmt: skip
    vocabulary = {"vocab_size": len(tokenizer)}
    bert = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    gpt2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "bos_token_id": 5, "eos_token_id": 5}
    t5 = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    made = {
        "bert": tf.BertForMaskedLM(tf.BertConfig(**vocabulary, **bert, max_position_embeddings=64)),
        "gpt2": tf.GPT2LMHeadModel(tf.GPT2Config(**vocabulary, **gpt2)),
        "t5": tf.T5ForConditionalGeneration(tf.T5Config(**vocabulary, **t5, pad_token_id=0, eos_token_id=5)),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def adapt(folder: Path) -> None:
    """Copies of the scripts with the import line after their imports."""
    for script in Path(str(SCRIPTS)).glob("*.py"):
        text = script.read_text()
        names = (
            "Seq2SeqTrainer, Seq2SeqTrainingArguments" if "Seq2Seq" in text else "Trainer, TrainingArguments"
        )
        line = f"from paceline import {names}\n"
        before = r"^(# Will error if|if is_torch_xla_available\(\):)"
        (folder / script.name).write_text(re.sub(before, line + r"\1", text, count=1, flags=re.M))


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("evaluate")
    folder = tmp_path_factory.mktemp("scripts")
    write_data(folder)
    write_models(folder)
    adapt(folder)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_a_script_needs_the_import_line_and_nothing_else(workshop: Path, name: str) -> None:
    if not (workshop / f"{name}.py").is_file():
        pytest.skip(f"{SCRIPTS} has no {name}.py")
    model, arguments, metrics = RUNS[name]
    output = workshop / f"out_{name}"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(workshop / "home")}
    common = (
        f"--model_name_or_path {workshop / model} --output_dir {output} --do_train --do_eval --max_steps 4 "
        "--save_steps 2 --logging_steps 2 --per_device_train_batch_size 4 --use_cpu --disable_tqdm true"
    )
    command = [sys.executable, "-m", "paceline", "launch", "--cpu", "--num_processes", "2", f"{name}.py"]
    done = subprocess.run(
        [*command, *common.split(), *arguments.split()],
        cwd=workshop, env=os.environ | offline, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((output / "all_results.json").read_text())
    assert set(metrics) <= set(results), results
    assert (output / "checkpoint-4" / "manifest.json").is_file()
    shutil.rmtree(output)
