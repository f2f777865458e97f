"""The sentence templates that any plot may use, and the reader of the template language.

    beat name            no indent
      A form.            two spaces: one way to tell the beat; a deeper line goes on with the form above
    [a|b|]               one of these, the last one empty
    {hero} {He} {obj}    a field; an upper-case letter capitalises it, and opens a new sentence

Fields are filled by `stories.Teller`, which writes a name instead of a pronoun wherever the pronoun could
refer to another character. {he} {him} {his} are the hero's, {fhe} {fhim} {fhis} the friend's.
"""
from __future__ import annotations


def read_forms(text: str) -> dict[str, tuple[str, ...]]:
    """Beat name to its forms, in the order written."""
    forms: dict[str, list[str]] = {}
    beat = ""
    for line in filter(None, text.splitlines()):
        indent = len(line) - len(line.lstrip())
        if indent == 0:
            beat = line
            assert beat not in forms, f"beat {beat!r} is defined twice"
            forms[beat] = []
        elif indent == 2: forms[beat].append(line.strip())
        else: forms[beat][-1] += " " + line.strip()
    return {name: tuple(lines) for name, lines in forms.items()}


SCENES = read_forms("""
once
  Once upon a time, there was {a_kind} named {hero}.
  Once upon a time, {a_kind} named {hero} lived {home}.
  Once upon a time, there was {a_kind} named {hero} who lived {home}.
  Once upon a time, {home}, there lived {a_kind} named {hero}.
open
  There was once {a_kind} named {hero} who lived {home}.
  {Hero} was {a_kind} who lived {home}.
  Long ago, {a_kind} named {hero} lived {home}.
  A long time ago, there was {a_kind} named {hero}.
  {When}, {a_kind} named {hero} was [full of joy|ready to play|in a good mood].
  {Home}, there lived {a_kind} named {hero}.
  {Hero} was {a_kind} with [bright|big] eyes and a [good|warm] heart.
  Not so long ago, {a_kind} named {hero} lived {home}.
love
  {He} loved to [play outside|sing songs|look at the clouds|tell funny stories|run and jump|make new things].
  {He} liked to [laugh and play|help people|learn new things|sing with the birds|go for long walks].
  Every day, {he} [learned something new|played from morning until night|found something fun to do].
own
  {He} had {a_obj}. {He} took {them} everywhere.
  {His} favorite thing was {a_obj}.
  {He} had {a_obj} that {he} loved [very much|more than anything].
  For {his} birthday, {he} [got|was given] {a_obj}.
  {Elder} had given {him} {a_obj}.
  {He} had {a_obj}, and {he} was very proud of {them}.
go
  {When}, {he} [went|walked|skipped] to {place} with the {obj}.
  {When}, {he} [took|carried] the {obj} to {place}.
  {When}, {hero} wanted to play {at}. {He} [took|brought] the {obj} with {him}.
walk
  {When}, {he} [went|walked|skipped] to {place}.
  {When}, {hero} went for a walk. Soon {he} came to {place}.
  {When}, {hero} was [playing|walking] {at}.
sky
  {sky}
cry
  {He} was so sad that {he} [began|started] to cry.
  {He} sat down [on the ground|] and cried.
  Tears ran down {his} [face|cheeks].
  {His} eyes filled with tears.
friend comes
  Just then, {friend} came by. "What is wrong?" {fhe} asked.
  {Friend} [saw {him} and ran over|heard {him} and came to help]. "What happened?" asked {friend}.
  Soon {friend} came along the path. "Are you all right, {hero}?" {fhe} asked.
elder comes
  {Elder} [saw {him} and|] came over. "What is the matter, {hero}?" asked {elder}.
  Then {elder} came by. "What happened, {hero}?" asked {elder}.
to elder
  {He} went [home|] to find {elder}. "{Mom}, can you help me?" {he} asked.
  {He} ran to {elder}. "{Mom}, please help me!" {he} said.
happy
  {Hero} was so happy that {he} [jumped up and down|danced|laughed out loud].
  {Hero} [smiled from ear to ear|had a big smile on {his} face].
  "Hooray!" [cried|shouted] {hero}. {He} was very happy.
  {Hero} felt [very happy|full of joy|so glad].
hold
  {He} [hugged|held] the {obj} [tightly|close] and smiled.
  {He} would not let go of the {obj} all day.
  {He} picked up the {obj} and [danced|spun] around.
thank friend
  "Thank you, {friend}!" said {hero}. "You are a [good|great|true] friend."
  {Hero} thanked {friend} and gave {fhim} a [big|warm] hug.
  "You are the best friend in the world," {hero} told {friend}.
thank elder
  "Thank you, {Mom}!" said {hero}.
  {Hero} thanked {elder} with a [big|warm] hug.
  "Thank you, {Mom}! You are the best!" said {hero}.
thank neighbor
  "Thank you so much!" said {hero} to {neighbor}.
  {Hero} thanked {neighbor} with a [big|happy] smile.
care end
  From that day on, {he} [always|] took good care of the {obj}.
  That night, {he} [slept|went to sleep] with the {obj} [next to|beside] {his} bed.
  {He} promised to be [more|very] careful with the {obj} from then on.
  After that, {he} never let the {obj} out of {his} sight.
friend end
  They played with the {obj} [together|] until [the sun went down|it was time for dinner].
  From that day on, they [often|always] shared the {obj}.
  The two friends [laughed and played|were happy] all day, and the {obj} {was} safe with them.
proud end
  {Hero} looked at the {obj} and felt [very|so] proud.
  Every day after that, {he} took out the {obj} with a smile.
  {He} never forgot [that day|what {he} had learned], and {he} kept the {obj} for many years.
lesson ask
  {He} learned that it is [good|wise] to ask for help.
  After that, {hero} was never afraid to ask for help.
lesson try
  {He} learned that you must never give up.
  {He} learned that hard work makes dreams come true.
lesson kind
  {He} learned that it feels good to be kind.
  {Hero} knew that a kind heart is the best gift of all.
  It felt good to help.
""")
