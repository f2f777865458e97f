"""Sentence templates of plots about a wish; `scenes` explains the template language."""
from __future__ import annotations

from .scenes import read_forms

WISHES = read_forms("""
gift
  For {his} birthday, {he} got {a_obj}.
  {Elder} gave {him} {a_obj}.
  {Elder} had a surprise for {him}. It was {a_obj}!
ride go
  {When}, {he} took the {obj} to {place}.
  {When}, {hero} took the {obj} outside.
ride want
  {He} wanted to ride the {obj}, but {he} did not know how.
  {Hero} got on the {obj} for the first time. {He} was a little afraid.
fail ride
  {He} tried, but {he} fell [off|down] and hurt {his} knee.
  The {obj} went left and right, and down {he} fell.
advice
  "Do not give up," said {elder}. "[Try again|You have to practice]."
  {Elder} helped {him}. "Go slowly, and do not be afraid," said {elder}.
practice
  {Hero} tried again and again. Every day, it was a little easier.
  {He} practiced every day for a week.
  So {hero} tried once more, and then once more.
ride well
  At last, {he} could ride the {obj} [all the way home|without any help]!
  Then, one day, {he} rode the {obj} down the path and did not fall.
tune want
  {He} wanted to play a song on the {obj}.
  {Hero} dreamed of playing the {obj} for everyone.
fail tune
  But when {he} played, the {obj} made a terrible noise.
  {He} tried to play, but it sounded so bad that the birds flew away.
tune well
  At last, {he} played a [happy|beautiful] song on the {obj}, and everyone clapped.
  One evening, {he} played the {obj} for {elder}. It sounded wonderful.
fly want
  {He} wanted to make the {obj} fly high in the sky.
  {Hero} hoped that the {obj} would fly above the trees.
fail fly
  {He} ran and ran, but the {obj} fell to the ground.
  The {obj} went up a little, and then it came down again.
friend shows
  {Friend} was watching. "You must run into the wind," {fhe} said, and {fhe} showed {him} how.
  Then {friend} came to help. {Fhe} held the {obj} while {hero} ran with the string.
fly well
  This time, the wind took the {obj}, and it flew higher and higher.
  At last, the {obj} flew up into the sky like a bird!
alone
  But {he} had no friends to play with.
  {He} was often alone, and {he} wished for a friend.
see child
  There {he} saw {new_friend}, sitting alone {spot1}.
  {New_friend} was there, too, but {fhe} did not say a word.
shy
  {Hero} was too shy to speak. {He} looked at the {obj} and thought for a while.
  At first, they only looked at each other.
offer play
  Then {he} held out the {obj}. "Do you want to play with me?" {he} asked.
  "Would you like to play with my {obj}?" asked {hero}.
play end
  They played with the {obj} all day, and {hero} was not alone anymore.
  From then on, they met every day and took turns with the {obj}.
friends go
  {When}, {hero} and {friend} went to {place}.
  {Hero} had a good friend. {When}, {he} and {friend} were playing {at}.
both find
  They found {a_obj} {spot1}.
  There was {a_obj} {spot1}. They both saw it.
quarrel
  "{This} {is} mine!" said {hero}. "No, I saw it first!" said {friend}.
  They both wanted to play with it. "Give me the {obj}!" [cried|shouted] {friend}.
pull
  {Hero} pulled on one side and {friend} pulled on the other. They both fell into the mud.
  They pulled and pulled until the {obj} [almost broke|fell to the ground].
apart
  They were both angry, and nobody had any fun.
  {Friend} turned away and began to cry. {Hero} felt bad.
sorry
  "I am sorry," said {hero}. "I am sorry, too," said {friend}.
  {Hero} thought about it. "I am sorry. You can have the first turn," {he} said.
turns
  They made a plan. First {friend} played with it, and then {hero} did.
  So they took turns, and it was much more fun.
turns end
  They laughed all day, and the {obj} belonged to both of them.
  In the end, {hero} and {friend} shared the {obj} and stayed good friends.
lesson share
  {Hero} learned that a friend is better than any toy.
  They learned that it is good to share.
birthday
  It was almost time for {elder}'s birthday. {Hero} wanted to make a present.
  {Hero} wanted to surprise {elder}. "I will make a present," {he} thought.
make
  {He} sat down and worked [all day|very hard]. {He} made {a_obj}.
  In {his} room, {he} made {a_obj}. It took a long time.
spoil
  But then the {obj} came apart. "Oh no!" {he} cried.
  But {he} dropped the {obj}, and it got dirty.
again
  {He} did not give up. {He} fixed the {obj} and made it even better.
  {He} took a deep breath and worked on it again until it looked right.
present
  "This is for you, {Mom}!" said {hero}. {Elder} looked at the {obj} and smiled.
  The next day, {he} gave the {obj} to {elder}. "Did you make this? It is beautiful!" said {elder}.
present end
  {Elder} loved the {obj}, and {hero} was very proud.
  {Elder} gave {him} a big hug and kept the {obj} forever.
bake want
  {When}, {hero} and {elder} wanted to make {a_obj}.
  {When}, {elder} said, "Let us make {a_obj}!" {Hero} was happy to help.
missing
  But there was no {ingredient} in the kitchen.
  They looked for the {ingredient}, but there was none left.
ask food
  {Hero} went to {neighbor}. "May I have some {ingredient}?" {he} asked. "Of course," said {neighbor}.
  So {he} ran to {neighbor}, who gave {him} some {ingredient}. {He} carried it home with great care.
mix
  They mixed everything in a big pot. {Hero} got some of it on {his} nose, and they laughed.
  {Hero} mixed everything with a spoon, and {elder} lit the fire.
bake wait
  Soon the whole house smelled wonderful.
  {He} waited and waited. It was hard to wait!
share baked
  {Hero} did not forget {neighbor}. There was enough of the {obj} for {neighbor}, too.
  {Hero} took some of the {obj} to {neighbor} to say thank you.
baked end
  At last, the {obj} {was} ready. {It} tasted [so good|wonderful]!
  They sat at the table and ate the {obj} together. Everyone was happy.
seed
  {When}, {elder} gave {him} a {noun} seed. "Take good care of it," said {elder}.
  {When}, {hero} found a {noun} seed in {his} pocket.
plant
  {He} dug a small hole in the ground and put the seed in it.
  {He} planted the seed in the garden, where the sun was warm.
wait seed
  {He} waited and waited, but nothing happened. "Will it ever grow?" {he} asked.
  The next day, {he} looked, but there was nothing to see. {He} was a little sad.
water seed
  "You must wait," said {elder}. So {he} gave it water every day.
  {He} did not give up. Every morning, {he} gave it some water and sang a song.
sprout
  One day, there was a little green leaf! {Hero} jumped for joy.
  Then {he} saw something small and green. It was growing!
grown
  It grew and grew. At the end of the summer, there was {a_obj}.
  Week after week, it grew, until it was {a_obj}.
plant end
  {Hero} showed the {obj} to everyone. {He} was so proud.
  "You did it!" said {elder}. They looked at the {obj} together and smiled.
alone home
  {When}, {hero} was playing in the house.
  {When}, {hero} was running around inside, even though it was not allowed.
knock
  {His} arm hit {a_obj} that belonged to {elder}. It fell to the floor and broke.
  {He} did not look, and {he} ran into the table. {A_obj} fell down and broke. {Elder} loved it very much.
hide
  {Hero} was afraid. {He} hid the {obj} under the bed.
  "Nobody must know," {he} thought. {He} pushed the {obj} under a chair.
worry
  But {he} felt bad. {He} could not eat, and {he} could not play.
  All day, {he} had a bad feeling in {his} tummy.
confess
  At last, {he} went to {elder}. "I broke the {obj}. I am very sorry," {he} said.
  Then {he} told {elder} the truth. "It was me. I broke the {obj}," {he} said.
forgive
  {Elder} was quiet for a moment. "Thank you for telling me the truth," said {elder}.
  "I am not angry," said {elder}. "I am glad that you told me."
mend
  They found all the pieces and fixed it with some glue.
  Together they picked up the pieces and put them back together.
lesson truth
  {He} learned that it is always best to tell the truth.
truth end
  The {obj} did not look the same, but {elder} loved it even more.
  {Hero} felt much better, and {he} never ran near the {obj} again.
heavy
  There {he} saw {neighbor}, who was carrying {a_obj}. It was full of [wood|potatoes|corn].
  On the way {he} met {neighbor} with {a_obj}. "This is too much for me," said {neighbor}.
offer help
  "I can help you," said {hero}, and {he} took one side of the {obj}.
  "Let me carry that {obj} for you!" said {hero}.
carry load
  It was hard work, but {he} did not stop.
  They walked up the road, step by step.
rest
  They stopped once to rest under a tree and talked about the weather.
  Halfway there, {he} was tired. {He} took a deep breath and went on.
arrive
  At last, they came to the house and put the {obj} down at the door.
  Soon they were there. {Hero} put the {obj} on the table.
reward
  "You are so strong!" said {neighbor}, and gave {him} [some warm milk|some nuts|a glass of juice].
  {Neighbor} was very thankful and told {him} a funny story.
help end
  The next day, {hero} came back to help with the {obj} again.
  {Hero} smiled all the way home. The {obj} had been heavy, but {his} heart was light.
wander
  {He} followed a [strange sound|little bird|sweet smell] and went far from the path.
  {He} walked on and on and did not look where {he} was going.
lost way
  Soon {he} did not know the way home. All the trees looked the same.
  Then {he} looked around. {He} was lost, and it was getting dark.
call
  At last, {he} remembered the {obj}. {He} made as much noise with it as {he} could.
  {He} took the {obj} and made a loud sound, again and again.
heard
  {Elder} heard it and came running. "There you are!" said {elder}, and they walked home.
  {Friend} heard the {obj} from far away and found {him}. "Follow me! I know the way," said {friend}.
call end
  From that day on, {hero} never went far away without the {obj}.
  At home, {he} put the {obj} next to {his} bed. "You saved me," {he} said.
race day
  {When}, there was a big race {at}. {Hero} and {friend} wanted to win {a_obj}.
  {When}, {hero} and {friend} went to {place} for a race. The winner would get {a_obj}.
start
  "One, two, three, go!" They ran as fast as they could. Soon {hero} was ahead.
  They started to run. {Hero} was fast, and {friend} was right behind {him}.
trip
  Then {friend} tripped on a root and fell down. "Ouch!" {fhe} cried.
  But {friend} fell and hurt {fhis} foot.
stop help
  {Hero} stopped. {He} wanted to win, but {he} went back to help {friend}.
  {Hero} turned around and ran back. "Take my {hand}," {he} said.
finish
  {Hero} and {friend} walked on together and came in last, but everyone clapped.
  They came in last, side by side.
prize
  "You are the real winners," said {neighbor}, and gave the {obj} to both of them.
  The winner saw this and gave them the {obj}. "You were so kind. This is for you!"
race end
  {Hero} let {friend} take the {obj} home first. They took turns from then on.
  {Hero} and {friend} [held|lifted] up the {obj} and laughed. It was the best race of all.
shop
  {When}, {hero} walked past a shop. There {he} saw {a_obj} in the window.
  There was a shop near {his} house. {When}, {he} saw {a_obj} there.
no money
  {He} wanted to have the {obj}, but {he} had no money.
  "How much is that {obj}?" {he} asked. It was too much for {him}.
work ask
  "Do you need any help?" {he} asked {neighbor}. "Yes, I do!" said {neighbor}.
  {Hero} had an idea. {He} went to {neighbor} and asked for work.
work
  {He} swept the floor, washed the windows, and carried wood. {Neighbor} gave {him} some money.
  All week, {he} worked hard [after school|in the mornings], and {neighbor} paid {him} for it.
work week
  {He} worked for {neighbor} all week and got some money.
  So {he} helped {neighbor} every day, and {neighbor} paid {him} for it.
buy
  With the money in {his} pocket, {he} went to the shop and bought the {obj}.
  {He} counted the money. It was enough! {He} ran to the shop and bought the {obj}.
ill
  Then {he} heard that {friend} was ill and had to stay in bed.
  But then {friend} became ill and could not go outside.
visit
  {He} took the {obj} to {friend}. "This is for you," {he} said.
  {He} went to see {friend} and put the {obj} on the bed. "I hope you feel better soon," {he} said.
visit end
  {Friend} held the {obj} and smiled for the first time in days. {Hero} was happy, too.
  {Friend} loved the {obj}, and soon {fhe} was well again. They played with it every day.
""")
