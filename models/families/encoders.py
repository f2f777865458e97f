"""The families of encoders, by the architecture of config.json."""
from . import bert, modernbert, rotary_bert
from .encoder import EncoderFamily

ENCODERS: dict[str, EncoderFamily] = {
    f"{name}{kind}": family
    for families in (bert.FAMILIES, rotary_bert.FAMILIES, modernbert.FAMILIES)
    for name, family in families.items() for kind in ("Model", "ForMaskedLM", "ForSequenceClassification")}
