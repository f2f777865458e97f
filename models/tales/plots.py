"""The plots. A plot is a line of beats in the language of `Plot.beats`.

    lose            tell this beat
    love?           tell it half of the time
    a+b/c+d/-       tell a then b, or c then d, or nothing
    find:alone      a colon stands for the space in a beat's name
"""
from __future__ import annotations

from typing import NamedTuple

from .mishaps import MISHAPS
from .scenes import SCENES
from .wishes import WISHES


class Plot(NamedTuple):
    name: str
    things: str                     # pool in words.THINGS
    beats: str
    cast: str = "child animal"      # who may be the hero
    place: str = ""                 # tag that the place needs
    seasons: str = "spring summer autumn winter"


PLOTS = (
    Plot("lost", "keep", beats=
         "love? own go sky? lose cry/ask:where search? "
         "friend:comes+tell:lost+find:friend+happy+thank:friend/to:elder+hint+find:back+happy/"
         "elder:comes+hint+find:back+hold/idea+find:alone+hold care:end"),
    Plot("stuck", "fly", place="tree", beats=
         "love? own go sky? stuck jump:fail cry?+friend:comes+friend:climbs+thank:friend+friend:end/"
         "to:elder+elder:ladder+lesson:ask?+care:end/elder:comes+elder:ladder+thank:elder+care:end/"
         "squirrel+happy+care:end"),
    Plot("float", "float", place="water", seasons="spring summer autumn", beats=
         "love? own go sky? float call:back? chase friend:comes+friend:stick+thank:friend+friend:end/"
         "duck+happy+care:end/wind:back+happy+care:end"),
    Plot("broken", "break", beats=
         "love? own go break cry friend:comes+friend:fixes+works+thank:friend+friend:end/"
         "to:elder+elder:fixes+works+thank:elder+care:end/"
         "elder:comes+elder:fixes+works+lesson:ask?+care:end/fix:alone+works+lesson:try?+care:end"),
    Plot("share", "food", beats=
         "love? food go sky? hungry offer eat favor? lesson:kind? share:end"),
    Plot("dark", "comfort", beats=
         "love? night noise elder:night+elder:comfort/own:comfort+tell:self calm night:end"),
    Plot("owner", "keep", beats=
         "love? walk sky? find:thing wonder ask:neighbor meet:owner give:back new:friends lesson:kind? "
         "owner:end"),
    Plot("rescue", "wrap", beats=
         "love? own go sky? hear:pet pet:hurt wrap:pet carry:home care:pet pet:well pet:end"),
    Plot("ride", "ride", cast="child", seasons="spring summer autumn", beats=
         "love? gift ride:go ride:want fail:ride cry? advice practice ride:well happy lesson:try? "
         "proud:end"),
    Plot("tune", "tune", beats=
         "love? gift tune:want fail:tune advice practice tune:well happy lesson:try? proud:end"),
    Plot("fly", "glide", seasons="spring autumn", beats=
         "love? gift go fly:want fail:fly advice+practice/friend:shows fly:well happy lesson:try? "
         "proud:end"),
    Plot("alone", "toy", beats=
         "love? alone own go sky? see:child shy offer:play new:friends play:end"),
    Plot("quarrel", "toy", beats=
         "love? friends:go sky? both:find quarrel pull apart sorry turns lesson:share? turns:end"),
    Plot("present", "gift", beats=
         "love? birthday make spoil+again/- present present:end"),
    Plot("bake", "baked", beats=
         "love? bake:want missing ask:food thank:neighbor? mix bake:wait? baked:end share:baked?"),
    Plot("seed", "plant", seasons="spring", beats=
         "love? seed plant wait:seed water:seed sprout grown plant:end"),
    Plot("truth", "fragile", beats=
         "love? alone:home knock hide worry? confess forgive mend lesson:truth? truth:end"),
    Plot("help", "load", beats=
         "love? walk sky? heavy offer:help carry:load rest? arrive reward help:end"),
    Plot("way", "call", place="wild", beats=
         "love? own go sky? wander lost:way cry? call heard happy? call:end"),
    Plot("race", "prize", beats=
         "love? race:day sky? start trip stop:help finish prize race:end"),
    Plot("earn", "shop", cast="child", beats=
         "love? shop no:money work:ask work buy happy lesson:try? care:end"),
    Plot("gift for friend", "shop", cast="child", beats=
         "shop no:money work:week ill buy visit visit:end"),
)

FORMS = SCENES | MISHAPS | WISHES
