import re
from pathlib import Path

import pytest
import yaml

from jaxpipe.train import Config, load_config
from jaxpipe.train.config import defaults_yaml, parse_yaml

PRESETS = {"llama-tiny": {"base_emb_dim": 32}, "llama2-7b": {"base_emb_dim": 4096, "head_dim": 128}}


def load(*overrides: str, files: tuple[Path, ...] = ()) -> Config:
    return load_config(files, overrides, presets=PRESETS)


def refusal(*overrides: str, files: tuple[Path, ...] = ()) -> str:
    with pytest.raises(ValueError) as error:
        load(*overrides, files=files)
    return str(error.value)


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str, name: str = "my.yml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_the_printed_keys_are_a_file_of_all_defaults_in_order():
    values = parse_yaml(defaults_yaml(), "printed")
    assert list(values) == list(Config.model_fields)
    assert Config(**values) == Config()


def test_every_printed_key_is_explained():
    lines = defaults_yaml().splitlines()
    keys = [i for i, line in enumerate(lines) if line and not line.startswith("#")]
    assert len(keys) == len(Config.model_fields)
    for i in keys:
        assert re.search(r"  # \S", lines[i]) or re.match(r"# [^-]", lines[i - 1]), lines[i]


def test_without_files_and_overrides_only_the_preset_differs_from_the_defaults():
    assert load() == Config(base_emb_dim=32)


def test_a_file_wins_over_the_preset_and_an_override_over_both(file):
    mine = file("model_name: llama2-7b\nhead_dim: 64\nsteps: 5\n")
    config = load("steps=7", files=(mine,))
    assert (config.base_emb_dim, config.head_dim, config.steps) == (4096, 64, 7)


def test_later_files_and_overrides_win(file):
    files = (file("steps: 1\nlog_period: 2\n", "a.yml"), file("steps: 3\n", "b.yml"))
    assert load(files=files).steps == 3
    assert load(files=files).log_period == 2
    assert load("steps=4", "steps=5", files=files).steps == 5


def test_a_model_named_by_an_override_brings_its_preset_below_the_file(file):
    config = load("model_name=llama2-7b", files=(file("base_emb_dim: 8\n"),))
    assert (config.base_emb_dim, config.head_dim) == (8, 128)


def test_an_empty_file_changes_nothing(file):
    assert load(files=(file("# nothing\n"),)) == load()


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", "0.001", ".1e-2", "+1e-03"])
def test_floats_may_be_written_in_any_way(text: str, file):
    assert load(f"learning_rate={text}").learning_rate == 1e-3
    assert load(files=(file(f"learning_rate: {text}\n"),)).learning_rate == 1e-3


def test_an_integer_is_a_float_too():
    assert load("per_device_batch_size=2").per_device_batch_size == 2.0


def test_values_may_hold_equals_signs_and_nothing_at_all():
    assert load("run_name=a=b").run_name == "a=b"
    assert load("tokenizer_path=").tokenizer_path == ""


def test_one_text_file_needs_no_list():
    assert load("dataset_type=text", "data_files=a.txt").data_files == ("a.txt",)
    assert load("dataset_type=text", "data_files=[a.txt, b]").data_files == ("a.txt", "b")


def test_rules_are_lists_of_pairs():
    config = load("logical_axis_rules=[[embed, fsdp], [mlp, [tensor, expert]], [norm, null]]")
    assert config.logical_axis_rules == (
        ("embed", "fsdp"),
        ("mlp", ("tensor", "expert")),
        ("norm", None),
    )


def test_an_unknown_key_is_named_with_its_source_and_nearest_neighbour(file):
    assert refusal("step=3") == (
        "the command line sets `step`, which is no key. Did you mean `steps`? "
        "`jaxpipe train --keys` lists them all."
    )
    assert "my.yml sets `zzz`, which is no key. `jaxpipe train --keys`" in refusal(
        files=(file("zzz: 3\n"),)
    )


def test_an_unknown_model_lists_the_known_ones():
    assert refusal("model_name=llama2-7") == (
        "`model_name` is 'llama2-7'. Did you mean `llama2-7b`? Models: llama-tiny, llama2-7b."
    )
    assert "`model_name` is [1]." in refusal("model_name=[1]")


@pytest.mark.parametrize(
    ("override", "value", "wish"),
    [
        ("steps=ten", "'ten'", "a valid integer"),
        ("steps=1.5", "1.5", "a valid integer"),
        ("steps=true", "True", "a valid integer"),
        ("steps=0", "0", "greater than or equal to 1"),
        ("num_pipeline_repeats=0", "0", "at least 1, or -1"),
        ("packing=3", "3", "a valid boolean"),
        ("run_name=[3]", "[3]", "a valid string"),
        ("learning_rate=.inf", "inf", "a finite number"),
        ("learning_rate=fast", "'fast'", "a valid number"),
        ("dtype=int8", "'int8'", "'bfloat16' or 'float32'"),
        ("enable_progress_bar=x", "'x'", "'auto' or a valid boolean"),
        ("data_files=[1]", "[1]", "a valid string"),
    ],
)
def test_a_wrong_value_is_shown_with_what_is_expected(override: str, value: str, wish: str):
    key = override.split("=")[0]
    assert refusal(override) == (
        f"`{key}` is {value} (from the command line). It should be {wish}."
    )  # fmt: skip


def test_all_wrong_values_are_told_at_once_each_with_its_source(file):
    message = refusal("steps=ten", files=(file("packing: 3\n"),))
    assert "`steps` is 'ten' (from the command line)" in message
    assert re.search(r"`packing` is 3 \(from .*my\.yml\)", message)


def test_a_schedule_without_an_engine_has_that_of_the_front_door(file):
    alone = load("pipeline_schedule=1f1b")
    assert (alone.pipeline_engine, alone.pipeline_schedule) == ("scheduled", "1f1b")
    assert (
        load("pipeline_schedule=1f1b", files=(file("pipeline_engine: mpmd"),)).engine.name == "mpmd"
    )
    circular = load("pipeline_schedule=circular")
    assert circular == load() and circular.pipeline_engine == "circular"
    message = refusal("pipeline_schedule=1f1b", files=(file("pipeline_engine: circular"),))
    assert "`pipeline_engine` is 'circular' and `pipeline_schedule` is '1f1b'" in message


def test_values_that_do_not_fit_together_are_refused():
    assert refusal("dataset_type=text", "data_files=[]") == (
        "`dataset_type` is 'text' and `data_files` is empty. Give files or folders."
    )


def test_a_tag_that_would_run_code_is_refused(file):
    tag = "!!python/object/apply:os.system [ls]"
    assert "tags that would make Python objects are refused" in refusal(f"run_name={tag}")
    assert "my.yml" in refusal(files=(file(f"run_name: {tag}\n"),))


def test_an_override_without_a_value_or_key_is_refused():
    for text in ("steps", "=3", ""):
        assert f"The override {text!r} is not `key=value`" in refusal(text)


def test_a_key_given_twice_in_a_file_is_refused(file):
    assert "'steps' is given twice; keep one (line 2)" in refusal(
        files=(file("steps: 1\nsteps: 2\n"),)
    )


def test_a_file_that_is_missing_broken_or_no_mapping_is_refused(tmp_path: Path, file):
    assert "none.yml: no such file" in refusal(files=(tmp_path / "none.yml",))
    assert "my.yml is not valid YAML" in refusal(files=(file("a: [1\n"),))
    assert "my.yml holds a list" in refusal(files=(file("- 1\n"),))


SOURCES = "data_sources=[{type: text, files: a.txt, weight: 3}, {type: jsonl, files: [b, c]}]"


def test_sources_of_a_mixture_are_lists_of_mappings():
    first, second = load("dataset_type=mixture", SOURCES).data_sources
    assert (first.type, first.files, first.weight) == ("text", ("a.txt",), 3.0)
    assert (second.type, second.files, second.weight) == ("jsonl", ("b", "c"), 1.0)


def test_the_sources_of_a_runs_config_yml_can_be_read_again(file):
    config = load("dataset_type=mixture", SOURCES)
    text = yaml.safe_dump(config.model_dump(mode="json"))
    assert load(files=(file(text),)) == config


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ("[{type: text, file: a}]", "`[0].file`: Extra inputs are not permitted."),
        ("[{type: text}]", "`[0].files`: Field required."),
        ("[{type: text, files: a}, {type: csv, files: a}]", "`[1].type`: It should be 'text', "),
        ("[{type: text, files: a, weight: 0}]", "`[0].weight`: It should be greater than 0."),
        ("[{type: text, files: []}]", "`[0]`: `files` is empty. Give files or folders."),
        ("[{type: tokens, files: a}]", "`[0]`: `type` is 'tokens' and `token_eod` is not set."),
        ("[{type: text, files: a, text_field: b}]", "`[0]`: `type` is 'text' and `text_field` is"),
    ],
)
def test_a_source_of_a_mixture_that_is_wrong_is_named_by_its_place(sources: str, message: str):
    found = refusal("dataset_type=mixture", f"data_sources={sources}")
    assert found.startswith("`data_sources` is [{")
    assert message in found
