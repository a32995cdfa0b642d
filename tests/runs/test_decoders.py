"""What was decoded is found again, or not, by what decided it."""

from ssd_train import config
from ssd_train.decoding.drafters.heads import HeadDrafter
from ssd_train.runs.decoders import configured_decoders, identity


def test_other_heads_make_stale_what_drafts_with_them_and_nothing_else(make_run, tmp_path):
    names = [name for name in config.choices("decoder") if not name.endswith(("_model", "_phrases", "_pv"))]
    run = make_run(tmp_path, "stages=[decode]", f"decoder=[{','.join(names)}]")
    decoders = configured_decoders(run)
    keys = []
    run.heads_dir.mkdir(parents=True)
    for weights in b"some", b"others":
        (run.heads_dir / "model.safetensors").write_bytes(weights)
        keys.append({name: identity(run, name, decoder) for name, decoder in decoders.items()})
    changed = {name for name in names if keys[0][name] != keys[1][name]}
    assert changed == {name for name in names if isinstance(decoders[name].drafter, HeadDrafter)}
    assert {"ssd", "eagle", "ssd_corrected"} < changed < set(names)
