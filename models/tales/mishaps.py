"""Sentence forms of the plots in which something goes wrong; `scenes` explains the form language."""
from __future__ import annotations

from .scenes import read_forms

MISHAPS = read_forms("""
lose
  {He} put the {obj} down to {distract}. When {he} looked again, {it} {was} gone.
  {He} played and played. Then {he} saw that the {obj} {was} gone.
  {He} stopped to {distract}. After a while, {he} looked for the {obj}, but {it} {was} not there.
  {He} left the {obj} [on the ground|next to the path] to {distract}. Then {he} forgot where {it} {was}.
ask where
  "Oh no! Where {is} my {obj}?" {he} [cried|said|asked].
  "My {obj}! {It} {is} gone!" [cried|said] {hero}.
search
  {He} looked {spot1}. {He} looked {spot2}. The {obj} {was} not there.
  {He} looked {spot1} and {spot2}, but {he} could not find {them}.
  First {he} looked {spot1}. Then {he} looked {spot2}. {He} found nothing.
tell lost
  "I lost my {obj}," said {hero}. "Do not worry. [We will find {them}|Let us look together]," said {friend}.
  "My {obj} {is} gone," said {hero}. "I will help you look," said {friend}.
find friend
  They looked [high and low|everywhere]. At last, {friend} looked {spot3}. There {was} the {obj}!
  {Friend} had good eyes. "Look over there!" {fhe} said. The {obj} {was} {spot3}.
  Together they looked again. The {obj} {was} {spot3}! {Friend} saw {them} first.
hint
  "Think hard, {hero}. Where did you play?" asked {elder}.
  {Elder} said, "Close your eyes and think. Where did you go today?"
  "Let us think," said {elder}. "Where did you see {them} last?"
idea
  Then {he} stopped and thought hard. {He} remembered one more place.
  But {hero} did not give up. {He} had an idea.
find alone
  {Hero} took one more look {spot3}. There {was} the {obj}!
  {He} ran and looked {spot3}. The {obj} {was} right there!
find back
  {Hero} went back to {place} and looked {spot3}. The {obj} {was} right there!
  {Hero} smiled, for now {he} knew where to look. {He} ran back and looked {spot3}. There {was} the {obj}!
stuck
  A [strong|sudden] wind came and [took|carried] the {obj} up into a tall tree.
  {He} [let go of|threw] the {obj}, and the wind blew {them} into a tree. Now {it} {was} stuck.
  The wind pulled the {obj} out of {his} {hand}s. Up, up {it} went, and {it} got stuck in a tree.
jump fail
  {He} jumped and jumped, but the tree was too tall.
  {He} shook the tree, but the {obj} did not move.
  {He} [tried to climb up|threw a stick], but {it} {was} too high.
friend climbs
  {Friend} was good at climbing. {Fhe} climbed up and [got|brought down] the {obj}.
  "I can help," said {friend}. {Hero} held the tree while {friend} climbed up and got the {obj}.
  {Hero} stood on a log, and {friend} gave {him} a long stick. With one push, the {obj} came down.
elder ladder
  {Elder} brought a ladder, climbed up, and took the {obj} out of the tree.
  "Do not worry," said {elder}, who took a long stick and pushed the {obj} down.
squirrel
  A little squirrel saw {him}. It ran up the tree and pushed the {obj} down.
  Then {he} had an idea. {He} threw a stick at the branch. The {obj} fell to the ground!
  {He} waited and waited. At last, the wind blew again and the {obj} fell down.
float
  The {obj} fell into the water and began to float away.
  A strong wind blew the {obj} into the water. It floated far from the shore.
call back
  "Oh no! Come back!" {he} [cried|shouted].
  "Help! My {obj}!" {he} [cried|shouted].
chase
  {Hero} ran along the shore, but the {obj} {was} too far away.
  {He} reached out with one {hand}, but {he} could not get {them}.
  The water was too deep, so {he} could only watch.
friend stick
  {Friend} found a long [stick|branch] and pulled the {obj} out of the water.
  "I have an idea," said {friend}. {Fhe} took a long stick and pulled the {obj} back.
duck
  A kind duck swam by. It pushed the {obj} back to the shore.
  Just then, a duck came along and pushed the {obj} all the way to {hero}.
wind back
  {He} waited and hoped. Then the wind turned and blew the {obj} back to the shore.
  {Hero} found a long stick. {He} pulled and pulled until the {obj} came back.
break
  {He} ran too fast and fell down. [Crack|Snap]! The {obj} broke.
  {He} dropped the {obj} by accident. It [hit|fell on] a rock and broke.
  Then {he} played too hard, and the {obj} broke into two [parts|pieces].
friend fixes
  "We can fix it," said {friend}. {Fhe} got some glue and string, and they worked together.
  {Friend} looked at the {obj}. "I know what to do," {fhe} said. They fixed it with some glue.
elder fixes
  {Elder} looked at the {obj}. "We can fix this together," said {elder}. They used glue and some string.
  "Do not worry," said {elder}. Together they fixed the {obj} with some glue and a nail.
fix alone
  Then {he} had an idea. {He} found some glue and worked on the {obj} all day.
  {Hero} wanted to fix it. {He} tried once, and it did not work. {He} tried again with some string.
works
  Soon the {obj} was as good as new.
  At last, the {obj} was fixed. It looked even better than before.
food
  {Elder} gave {him} {a_obj} to take along.
  {He} had {a_obj} for lunch.
  {Hero} helped {elder} and got {a_obj}.
hungry
  {He} met {friend} there. {Friend} looked sad. "I forgot my lunch, and I am so hungry," {fhe} said.
  {He} saw {friend}, who was sitting all alone. "I am hungry, but I have no food," said {friend}.
offer
  {Hero} looked at the {obj}. "You can have half of [my lunch|the {obj}]," {he} said.
  {Hero} was hungry, too, but {he} gave {friend} half of the {obj}.
  "Here, let us share," said {hero}, and gave half of the {obj} to {friend}.
eat
  They sat down and ate together. The {obj} tasted [very good|wonderful].
  {Friend} took a bite and smiled. "Thank you, {hero}! You are so kind," {fhe} said.
favor
  After lunch, {friend} showed {him} a secret path to a [pond|little cave].
  Then {friend} taught {him} a funny song, and they sang it together.
share end
  The {obj} {was} gone, but {hero} and {friend} were [very|both] happy.
  {Hero} thought that no {obj} had ever tasted so good. It was better to share.
  From that day on, when {hero} had {any_obj}, {he} always shared with {friend}.
night
  One night, {hero} could not sleep. It was very dark, and {he} was afraid.
  One night, there was a big storm. {Hero} hid under the covers and shook with fear.
  It was late at night. {Hero} was in bed, but the room was dark and {he} felt scared.
noise
  Tap, tap, tap! There was a strange noise at the window.
  {He} heard a strange noise. "What is that?" {he} [said|asked] in a small voice.
  A shadow moved on the wall. {He} wanted to hide.
elder night
  {Elder} heard {him} and came into the room. "Do not be afraid, {hero}. It is only the wind."
  {He} called {elder}. "It is only a branch in the wind," said {elder}.
elder comfort
  {Elder} gave {him} {a_obj}. "Keep {this} close, and you will not be alone."
  Then {elder} brought {him} {a_obj} and sat with {him} for a while.
own comfort
  Then {he} remembered {a_obj} that was [under|next to] the bed. {He} took {them} and held {them} close.
  {He} reached out and found {his} favorite thing, {a_obj}.
tell self
  "I can be brave," {he} told {himself}. {He} got up and looked. It was only a branch in the wind.
  {He} went to the window to look. It was only a little bird in the rain.
calm
  With the {obj} in {his} {hand}s, {hero} was not afraid anymore.
  {He} looked at the {obj} and felt safe. {He} [even|] laughed a little.
  {Hero} held the {obj} and took a slow, deep breath. {He} felt much better.
night end
  Soon {he} was fast asleep, with the {obj} next to {him}.
  {He} closed {his} eyes and slept until morning. The {obj} stayed by {his} side every night after that.
  In the morning, the sun was shining. "You kept me safe," {he} told the {obj}.
find thing
  There {he} saw {a_obj} {spot1}. "Who lost {this}?" {he} [asked|said].
  {He} looked {spot1} and found {a_obj}. There was nobody around.
  Then {he} found {a_obj} {spot1}.
wonder
  {He} wanted to keep {them}, but {he} knew that {it} {was} not {hers}.
  "Somebody must be sad without {this}," {he} thought.
  {Hero} wished to keep the {obj}, but that would not be right.
ask neighbor
  {He} showed the {obj} to {neighbor}. "{This} {is} not mine," said {neighbor}.
  {He} asked {neighbor} about the {obj}. "Ask around," said {neighbor}.
meet owner
  Then {he} met {new_friend}, who was crying. "I lost my {obj}," {fhe} said.
  Soon {he} saw {new_friend}. {Fhe} was looking [everywhere|under every bush] for something.
give back
  "{Is} {this} yours?" asked {hero}. "Yes! Thank you!" cried {friend}.
  {Hero} gave {friend} the {obj}. "You found {them}! Thank you so much!" {fhe} said.
new friends
  "My name is {friend}. Do you want to play?" {fhe} asked. "Yes!" said {hero}.
  {Hero} and {friend} became [good|best] friends that day.
  "I am {hero}. Let us be friends!" said {hero}. {Friend} smiled.
owner end
  They played with the {obj} until it was time to go home.
  {Hero} went home without the {obj}, but with a new friend. That was much better.
  {Friend} let {him} play with the {obj}, and they had a wonderful day.
hear pet
  Then {he} heard a small cry {spot1}.
  {He} stopped. There was a soft sound {spot1}.
pet hurt
  It was {a_pet}. Its leg was hurt.
  {He} looked and saw {a_pet}. It was lost and very tired.
  There was {a_pet}, all wet and shaking.
wrap pet
  "You poor little thing," said {hero}. {He} [put|wrapped] the {obj} around the {pet}.
  "Do not be afraid," {he} said softly. {He} put the {pet} in the {obj}.
carry home
  {He} carried it home to {elder}. "We must help it," said {elder}.
  {Hero} took the {pet} home. "Can we help it, {Mom}?" {he} asked. "Of course," said {elder}.
care pet
  They gave it some water and food, and it slept for a long time.
  {Hero} fed the {pet} every day and kept it warm.
pet well
  After a week, the {pet} was strong and happy again.
  Soon the {pet} was well. It jumped around the room.
pet end
  The {pet} became a good friend, and it always slept on the {obj}.
  {Hero} gave the {obj} to the {pet} for its bed. They were friends forever.
""")
