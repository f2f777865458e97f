"""Languages that Whisper knows: codes and English names, as its token <|code|> and as people write them.

Protocol: `language_code(text)` is the code of a code, a token or a name, None of anything else. Which
languages a model has its generation_config.json says; English-only models have none.
"""
from __future__ import annotations

_NAMES = """
en:english zh:chinese de:german es:spanish ru:russian ko:korean fr:french ja:japanese pt:portuguese
tr:turkish pl:polish ca:catalan nl:dutch ar:arabic sv:swedish it:italian id:indonesian hi:hindi
fi:finnish vi:vietnamese he:hebrew uk:ukrainian el:greek ms:malay cs:czech ro:romanian da:danish
hu:hungarian ta:tamil no:norwegian th:thai ur:urdu hr:croatian bg:bulgarian lt:lithuanian la:latin
mi:maori ml:malayalam cy:welsh sk:slovak te:telugu fa:persian lv:latvian bn:bengali sr:serbian
az:azerbaijani sl:slovenian kn:kannada et:estonian mk:macedonian br:breton eu:basque is:icelandic
hy:armenian ne:nepali mn:mongolian bs:bosnian kk:kazakh sq:albanian sw:swahili gl:galician mr:marathi
pa:punjabi si:sinhala km:khmer sn:shona yo:yoruba so:somali af:afrikaans oc:occitan ka:georgian
be:belarusian tg:tajik sd:sindhi gu:gujarati am:amharic yi:yiddish lo:lao uz:uzbek fo:faroese
ht:haitian_creole ps:pashto tk:turkmen nn:nynorsk mt:maltese sa:sanskrit lb:luxembourgish my:myanmar
bo:tibetan tl:tagalog mg:malagasy as:assamese tt:tatar haw:hawaiian ln:lingala ha:hausa ba:bashkir
jw:javanese su:sundanese yue:cantonese
"""
_OTHER_NAMES = """
burmese:my valencian:ca flemish:nl haitian:ht letzeburgesch:lb pushto:ps panjabi:pa moldavian:ro
moldovan:ro sinhalese:si castilian:es mandarin:zh
"""
LANGUAGES = {code: name.replace("_", " ") for code, name in (each.split(":") for each in _NAMES.split())}
CODES = {name: code for code, name in LANGUAGES.items()}
CODES |= dict(each.split(":") for each in _OTHER_NAMES.split())


def language_code(text: str) -> str | None:
    """The code of a language that is written as code, token or English name, in any case."""
    found = text.strip().lower().removeprefix("<|").removesuffix("|>")
    return found if found in LANGUAGES else CODES.get(found)
