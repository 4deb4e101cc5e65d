"""KVPolicy refuses what it cannot do, by name, and its presets are what they are said to be."""

import dataclasses

import pytest

from oscar_mm import InputError, KVPolicy
from oscar_mm.modality import Modality
from oscar_mm.policy import DEFAULT, PLAIN, Bits

CHOICES = {
    "key_axis": ("channel", "token"),
    "key_group": ("head", 32, 64, 128),
    "value_group": (32, 64, 128),
    "fit": ("minmax", "lsq"),
    "norm": ("plain", "refit", "unbiased"),
    "value_scale": ("plain", "unbiased"),
    "rotate": (True, False),
    "balance": (None, "weights"),
    "token_scaling": (None, "shared", "per_head"),
    "center": (True, False),
}
BY_CHANNEL = {"key_axis": "channel", "key_group": 128, "center": False}
NEEDS = {
    # What a choice needs of other fields.
    ("key_axis", "channel"): BY_CHANNEL,
    ("norm", "refit"): BY_CHANNEL,
    ("token_scaling", "shared"): BY_CHANNEL,
    ("token_scaling", "per_head"): BY_CHANNEL,
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
    ("center", 1),
    ("center", None),
    ("center", "mean"),
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
    ("bits", "modality", "width"),
    [
        *((bits, "text", bits) for bits in (0, 1, 5, 8, 2.0, "2", None, True, (), [2, 2, 2, 2])),
        # 16 is for keys and values alike.
        *((bits, "text", bits) for bits in ((2, 16), (16, 2), (3, 8), (3,), (3, 2, 2), ("3", 2))),
        *((bits, "text", bits) for bits in ((2.0, 2), (True, 2), (None, 2), ((2, 2), 2))),
        ({"image": 5}, "image", 5),
        ({"text": None}, "text", None),
        ({"text": 2, "video": (4, 16)}, "video", (4, 16)),
    ],
)
def test_bad_bits(bits: object, modality: str, width: object) -> None:
    """The message names the modality, what was given and what is allowed."""
    with pytest.raises(InputError) as error:
        KVPolicy(bits=bits)
    assert str(error.value) == (
        f"KVPolicy bits of {modality} = {width!r}: must be 2, 3, 4 or 16, or a pair of 2, 3 or 4 "
        "for keys and values, such as (3, 2)"
    )


def test_bits_of_keys_and_values() -> None:
    for width in ((3, 2), [3, 2], Bits(3, 2)):
        policy = KVPolicy(bits=width)
        assert [policy.bits_for(modality) for modality in Modality] == [Bits(3, 2)] * 4
        assert policy == KVPolicy(bits=(3, 2)) and hash(policy) == hash(KVPolicy(bits=(3, 2)))
        assert policy.packed_bits == (Bits(3, 2),)
    for both in (2, 3, 4, 16):
        assert KVPolicy(bits=both) == KVPolicy(bits=(both, both))
    for keys in (2, 3, 4):
        for values in (2, 3, 4):
            assert KVPolicy(bits=(keys, values)).bits.audio == Bits(keys, values)
    assert KVPolicy(bits=(3, 2)) != KVPolicy(bits=(2, 3))


def test_mapping_of_pairs() -> None:
    policy = KVPolicy(bits={"text": (4, 2), "image": [3, 2], "audio": (16, 16), "video": (4, 2)})
    assert [str(policy.bits_for(modality)) for modality in Modality] == ["4/2", "3/2", "4/2", "16"]


def test_bits_in_words() -> None:
    assert [str(bits) for bits in (Bits(2, 2), Bits(3, 2), Bits(2, 4), PLAIN)] == [
        *("2", "3/2", "2/4", "16")
    ]
    assert Bits(4, 2).packed and not PLAIN.packed
    assert Bits(16, 16) == PLAIN


def test_packed_bits_are_ascending_and_at_most_two() -> None:
    policy = KVPolicy(bits={"text": (4, 2), "image": (3, 4), "video": 16, "audio": (4, 2)})
    assert policy.packed_bits == (Bits(3, 4), Bits(4, 2)) and policy.packs
    assert KVPolicy(bits=16).packed_bits == ()
    # A modality that is not named counts with its 2.
    with pytest.raises(
        InputError, match=r"bits: 2, 3/2, 4: must be at most 2 different widths bel"
    ):
        KVPolicy(bits={"text": (3, 2), "image": 4})
    with pytest.raises(InputError, match=r"bits: 2/3, 3/2, 4/2: must be at most 2"):
        KVPolicy(bits={"text": (3, 2), "image": (2, 3), "video": (4, 2), "audio": 16})


def test_bits_of_an_unknown_modality() -> None:
    with pytest.raises(
        InputError, match=r"bits: unknown modality smell.*text, image, video, audio"
    ):
        KVPolicy(bits={"smell": 2})


@pytest.mark.parametrize("field", sorted(CHOICES))
def test_every_documented_choice_is_taken(field: str) -> None:
    for value in CHOICES[field]:
        needed = NEEDS.get((field, value), {})
        policy = KVPolicy(**{"value_scale": "plain", **needed, field: value})
        assert getattr(policy, field) is value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"token_scaling": "per_head"},
            "token_scaling='per_head' with key_axis='token': must be None, because each token has",
        ),
        (
            {"token_scaling": "shared"},
            "token_scaling='shared' with key_axis='token': must be None",
        ),
        (
            {"norm": "refit"},
            "norm='refit' with key_axis='token': must be 'plain' or 'unbiased', because keys have",
        ),
        (
            {"key_axis": "channel", "key_group": 128},
            "center=True with key_axis='channel': must be False",
        ),
        (
            {"key_axis": "channel", "center": False},
            "key_group='head' with key_axis='channel': must be 32 or 64 or 128, because a",
        ),
    ],
)
def test_fields_that_exclude_each_other(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=f"^KVPolicy {message}"):
        KVPolicy(**fields)
    with pytest.raises(InputError, match=f"^KVPolicy {message}"):
        KVPolicy.preset("compact", **fields)


def test_only_a_least_squares_fit_shrinks_values() -> None:
    with pytest.raises(InputError, match=r"value_scale='unbiased' with fit='minmax': must be 'pl"):
        KVPolicy(fit="minmax")
    with pytest.raises(InputError, match="value_scale='unbiased'"):
        KVPolicy.preset("oscar", value_scale="unbiased")
    assert KVPolicy.preset("oscar", fit="lsq", value_scale="unbiased").value_scale == "unbiased"


def test_bits_by_modality() -> None:
    policy = KVPolicy(bits={"image": 4, "audio": 16})
    two, four = Bits(2, 2), Bits(4, 4)
    assert [policy.bits_for(modality) for modality in Modality] == [two, four, two, PLAIN]
    assert policy.packs
    assert [KVPolicy(bits=4).bits_for(modality) for modality in Modality] == [four] * 4
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
    assert hash(policy) == before and policy.bits_for(Modality.VIDEO) == Bits(4, 4)
    assert KVPolicy(bits=policy.bits) == policy


def test_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        KVPolicy().window = 1
    with pytest.raises(InputError, match="key_group"):
        dataclasses.replace(KVPolicy(), key_group=7)


def test_presets() -> None:
    presets = {name: KVPolicy.preset(name) for name in KVPolicy.preset_names()}
    assert set(presets) == {"standard", "compact", "channel", "oscar", "kivi", "quarot", "bf16"}
    assert len(set(presets.values())) == 7 and DEFAULT == "standard"
    assert presets["compact"] == KVPolicy() == KVPolicy.preset("standard", bits=2)
    channel = presets["channel"]
    assert channel.key_axis == "channel" and channel.token_scaling == "per_head"
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
    assert quarot.key_axis == "token" and quarot.rotate and not quarot.center
    assert quarot.token_scaling is None
    assert (quarot.key_group, quarot.value_group) == ("head", 128)
    assert {name for name, p in presets.items() if p.value_scale == "plain"} == {
        *("oscar", "kivi", "quarot")
    }
    assert not presets["bf16"].packs
    standard = presets.pop("standard")
    assert set(standard.bits) == {Bits(3, 2)}
    assert standard.key_axis == "token" and standard.center and standard.token_scaling is None
    assert all(set(p.bits) == {Bits(2, 2)} for name, p in presets.items() if name != "bf16")


def test_preset_with_changes() -> None:
    changed = KVPolicy.preset("oscar", window=128, bits={"text": 4})
    assert changed.window == 128
    assert (changed.bits.text, changed.bits.image) == (Bits(4, 4), Bits(2, 2))
    # What a mapping does not name stays the preset's.
    wide = KVPolicy.preset("standard", bits={"text": (4, 2)})
    assert (wide.bits.text, wide.bits.image) == (Bits(4, 2), Bits(3, 2))
    assert (wide.name, KVPolicy.preset("kivi").name, KVPolicy().name) == (None, "kivi", "compact")
    assert dataclasses.replace(changed, window=32, bits=2) == KVPolicy.preset("oscar")
    with pytest.raises(InputError, match="no field groups"):
        KVPolicy.preset("oscar", groups=3)
    with pytest.raises(InputError, match=r"sinks=-2"):
        KVPolicy.preset("oscar", sinks=-2)


def test_a_name_may_hold_changes() -> None:
    assert KVPolicy.of("compact:window=128") == KVPolicy.preset("compact", window=128)
    changed = KVPolicy.preset("standard: bits=3/2, balance=none,rotate=false, sinks=0")
    expected = {"bits": (3, 2), "balance": None, "rotate": False, "sinks": 0}
    assert changed == KVPolicy.preset("standard", **expected)
    assert KVPolicy.preset("compact:window=128", window=64).window == 64
    few = KVPolicy.of("standard:bits.audio=2, bits.text=16,sinks=0")
    assert few == KVPolicy.preset("standard", bits={"audio": 2, "text": 16}, sinks=0)
    for text, message in {
        "compact:": "must be FIELD=VALUE",
        "compact:window": "policy change 'window': must be FIELD=VALUE",
        "compact:window=128,": "must be FIELD=VALUE",
        "compact:windows=128": "no field windows; did you mean window?",
        "compact:window=-1": "window='-1'",
        "compact:window=many": "window='many'",
        f"compact:window={'9' * 5000}": "must be a number of tokens",
        "compact:bits=3/2/1": "bits of text",
        "compact:bits.sound=2": "unknown modality sound",
        "compact:bits.audio=2,bits=3": "bits.audio for one: use one of them",
        "compact:window.audio=2": "no field window.audio",
        "compact:fit=lq": "fit='lq': must be one of 'minmax', 'lsq'",
        "compct:window=128": "unknown policy 'compct'.*; did you mean compact",
    }.items():
        with pytest.raises(InputError, match=message):
            KVPolicy.of(text)


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
