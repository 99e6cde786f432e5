"""MaxText's command with another program name."""

from pathlib import Path

import pytest

from jaxpipe.cli._options import read_settings, split_settings

COMMAND: str = (
    "src/maxtext/configs/base.yml run_name=pipeline_test_nnx base_output_directory=pipeline_test "
    "model_name=llama2-7b dataset_type=synthetic steps=15 debug_sharding=true "
    "per_device_batch_size=2 max_target_length=32 ici_pipeline_parallelism=2 "
    "num_pipeline_microbatches=4 num_layers_per_pipeline_stage=2 enable_checkpointing=false "
    "enable_nnx=true pure_nnx_decoder=true scan_layers_per_stage=false async_checkpointing=false"
)


def test_the_command_of_maxtexts_nnx_pipeline_is_read_as_it_stands(capsys):
    config = read_settings(COMMAND.split())
    assert (str(config.output_dir), config.steps) == ("pipeline_test", 15)
    assert config.num_layers_per_pipeline_stage == 2 and config.enable_nnx
    assert "is not there and has the name of MaxText's base.yml" in capsys.readouterr().err


@pytest.mark.parametrize("is_maxtexts", [True, False])
def test_a_base_yml_of_ones_own_is_read(is_maxtexts, tmp_path: Path, capsys):
    file = tmp_path / "configs" / "base.yml"
    file.parent.mkdir()
    file.write_text("steps: 3\n" + ("hardware: 'tpu'\n" if is_maxtexts else ""))
    files, pairs = split_settings([str(file), "steps=4"])
    assert files == ([] if is_maxtexts else [str(file)]) and pairs == ["steps=4"]
    assert ("not read" in capsys.readouterr().err) == is_maxtexts
