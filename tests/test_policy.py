"""KVPolicy refuses what it cannot do, by name, and its presets are what they are said to be."""

import dataclasses

import pytest

from oscar_mm import InputError, KVPolicy
from oscar_mm.modality import Modality

CHOICES = {
    "key_axis": ("channel", "token"),
    "key_group": (32, 64, 128),
    "value_group": (32, 64, 128),
    "fit": ("minmax", "lsq"),
    "norm": ("plain", "refit", "unbiased"),
    "value_scale": ("plain", "unbiased"),
    "rotate": (True, False),
    "balance": (None, "weights", "prompt", "auto"),
    "token_scaling": (None, "shared", "per_head"),
}
BAD = [
    ("key_axis", "head"),
    ("key_axis", None),
    ("key_group", 16),
    ("key_group", 32.0),
    ("key_group", "32"),
    ("value_group", 256),
    ("value_group", 0),
    ("value_group", True),
    ("fit", "mse"),
    ("fit", ["lsq"]),
    ("norm", None),
    ("norm", "Plain"),
    ("value_scale", "refit"),
    ("value_scale", None),
    ("rotate", 1),
    ("rotate", None),
    ("balance", "on"),
    ("balance", True),
    ("token_scaling", "per_token"),
    ("token_scaling", False),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_bad_choice(field: str, value: object) -> None:
    with pytest.raises(InputError) as error:
        KVPolicy(**{field: value})
    message = str(error.value)
    assert field in message and repr(value) in message and "\n" not in message
    assert all(repr(allowed) in message for allowed in CHOICES[field])


@pytest.mark.parametrize("field", ["window", "sinks"])
@pytest.mark.parametrize("value", [-1, 4097, 1.0, "4", None, True])
def test_bad_token_count(field: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"{field}=.*0 to 4096"):
        KVPolicy(**{field: value})


@pytest.mark.parametrize(
    "bits", [3, 0, 8, 2.0, "2", None, True, [2, 2, 2, 2], {"image": 3}, {"text": None}]
)
def test_bad_bits(bits: object) -> None:
    with pytest.raises(InputError, match=r"bits of (text|image) = .*2, 4 or 16"):
        KVPolicy(bits=bits)


def test_bits_of_an_unknown_modality() -> None:
    with pytest.raises(
        InputError, match=r"bits: unknown modality smell.*text, image, video, audio"
    ):
        KVPolicy(bits={"smell": 2})


@pytest.mark.parametrize("field", sorted(CHOICES))
def test_every_documented_choice_is_taken(field: str) -> None:
    for value in CHOICES[field]:
        assert getattr(KVPolicy(**{"value_scale": "plain", field: value}), field) is value


def test_only_a_least_squares_fit_shrinks_values() -> None:
    with pytest.raises(InputError, match=r"value_scale='unbiased' with fit='minmax': must be 'pl"):
        KVPolicy(fit="minmax")
    with pytest.raises(InputError, match="value_scale='unbiased'"):
        KVPolicy.preset("oscar", value_scale="unbiased")
    assert KVPolicy.preset("oscar", fit="lsq", value_scale="unbiased").value_scale == "unbiased"


def test_bits_by_modality() -> None:
    policy = KVPolicy(bits={"image": 4, "audio": 16})
    assert [policy.bits_for(modality) for modality in Modality] == [2, 4, 2, 16]
    assert policy.packs
    assert [KVPolicy(bits=4).bits_for(modality) for modality in Modality] == [4] * 4
    assert not KVPolicy(bits=16).packs
    assert not KVPolicy(bits=dict.fromkeys(("text", "image", "video", "audio"), 16)).packs


def test_equality_and_hash() -> None:
    same = [KVPolicy(bits=2), KVPolicy(bits={}), KVPolicy(bits={"video": 2}), KVPolicy()]
    assert len(set(same)) == 1
    assert KVPolicy(bits={"video": 4}) not in set(same)
    bits = {"video": 4}
    policy = KVPolicy(bits=bits)
    before = hash(policy)
    bits["video"] = 2
    assert hash(policy) == before and policy.bits_for(Modality.VIDEO) == 4
    assert KVPolicy(bits=policy.bits) == policy


def test_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        KVPolicy().window = 1
    with pytest.raises(InputError, match="key_group"):
        dataclasses.replace(KVPolicy(), key_group=7)


def test_presets() -> None:
    presets = {name: KVPolicy.preset(name) for name in KVPolicy.preset_names()}
    assert set(presets) == {"compact", "oscar", "kivi", "quarot", "bf16"}
    assert len(set(presets.values())) == 5
    assert presets["compact"] == KVPolicy()
    oscar = presets["oscar"]
    assert (oscar.key_group, oscar.value_group, oscar.fit, oscar.norm) == (
        32,
        32,
        "minmax",
        "plain",
    )
    assert (oscar.rotate, oscar.token_scaling, oscar.balance) == (True, "shared", None)
    assert not presets["kivi"].rotate and presets["kivi"].token_scaling is None
    quarot = presets["quarot"]
    assert quarot.key_axis == "token" and quarot.rotate
    assert (quarot.key_group, quarot.value_group) == (128, 128)
    assert {name for name, p in presets.items() if p.value_scale == "plain"} == {
        *("oscar", "kivi", "quarot")
    }
    assert not presets["bf16"].packs
    assert all(set(p.bits) == {2} for name, p in presets.items() if name != "bf16")


def test_preset_with_changes() -> None:
    changed = KVPolicy.preset("oscar", window=128, bits={"text": 4})
    assert (changed.window, changed.bits.text, changed.bits.image) == (128, 4, 2)
    assert dataclasses.replace(changed, window=32, bits=2) == KVPolicy.preset("oscar")
    with pytest.raises(InputError, match="no field groups"):
        KVPolicy.preset("oscar", groups=3)
    with pytest.raises(InputError, match=r"sinks=-2"):
        KVPolicy.preset("oscar", sinks=-2)


def test_of() -> None:
    policy = KVPolicy(window=7)
    assert KVPolicy.of(policy) is policy
    assert KVPolicy.of("kivi") == KVPolicy.preset("kivi")
    with pytest.raises(InputError, match=r"unknown policy 'int2'.*compact.*oscar.*bf16"):
        KVPolicy.of("int2")
    with pytest.raises(InputError, match="not int"):
        KVPolicy.of(2)
    with pytest.raises(InputError, match="unknown policy"):
        KVPolicy.preset(["oscar"])
