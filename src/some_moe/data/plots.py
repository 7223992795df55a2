"""Sentence plans of the stories: twelve plots, and the tables of what some of them are about.

A plot is a list of beats: the part of the plot, then the ways to tell it, between semicolons. Half of the
stories leave out a beat with "?". Before and after every plot come an opening and a closing of lexicon.py.
  {hero}         a slot: somebody, something or a turn of phrase of this story (see lexicon.py)
  [red|blue|]    one of these
  <want ...>     every word inside plays this role, unless it plays another
  walk/noun      a word in an unusual part of speech; it/object gives it a role
  h>f"..."       speech from hero to friend (e helper, x anybody else): "I" and "my" play the speaker's
                 role, "you" and "your" the listener's
Sentences begin in lower case and "a" is never "an": the teller sees to both.
"""

# The kinds of place that suit a plot, where not all do.
PLACES = {"truth": ("yard",), "build": ("wild", "yard")}

PLOTS = {
    "lost": """
opening = {friends}
want = {hero} had a {toy.full}[, and|.] [more than anything|most of all/pron] {he} {wanted} to {toy.use}
  {place.at}. ; of all {his} [things|toys|treasures], {hero} loved {his} {toy.full} best/adv. {he} {wanted} to
  {toy.use} {place.at}. ; h>f"today I will <want take my {toy.full} to {place.full}>," {hero} told {friend}
  {at_breakfast}.
problem = but when {he} {hero.went} to {place}, {hero} {noticed} that <problem the {toy.full} was
  [gone|missing]>. ; {one_day}, {hero} reached for the {toy.full}, but <problem {it} was [gone|nowhere to be
  seen|not there]>.
problem = h>"[oh dear, |]<problem [my {toy.full} is lost/adj|I have lost my {toy.full}]>," {sighed} {hero}[,
  {drooping}|].
problem = {he} looked {spot.1} and {spot.2}[,|.] but {he} found only {trifles}. ; {he} looked {spot.1}, but
  there/pron was nothing but {trifles}.
turn = {friend} {listened}. f>h"where were you when you last/adv held the {toy.full}?" asked {friend}. ; f>h"a
  {toy} cannot walk away, so let us think," said {friend}, who had come to {listen}.
turn = {hero} shut {his} eyes and {remembered} how {he} had stopped {spot.3} to {dawdle}. ; slowly {hero}
  {remembered} stopping {spot.3} to {dawdle}.
turn = the two friends {hurried} back, and there, {spot.3}, lay the {toy.full}[, {unharmed}|]. ; {hero} and
  {friend} {hurried} there, and sure enough, the {toy.full} was waiting {spot.3}.
ending? = h>f"without you, {friend}, I would still be looking for my {toy}," said {hero}. ; h>f"you think
  so/adv [well|carefully|cleverly|quickly|clearly], {friend}, and now we can {toy.use}," {cheered} {hero}. ;
  {hero} {hero.joy}[, and|.] {friend} {friend.joy}.
ending = first {hero} and then {friend} {toy.used} {place.at}[ {until_dusk}|]. ; all that/det {afternoon}
  {they} {toy.used}, and {hero} never let the {toy} out of {his} sight.
""",
    "quarrel": """
opening = {friends}
want = {one_day}, {hero} and {friend} found a {toy.full} {place.at}, and each/pron of {them} wanted to
  {toy.use} first. ; {place.at}, {helper} gave {hero} and {friend} a {toy.full} to share, but both/pron wanted
  to {toy.use} at once.
problem = h>f"I saw the {toy.full} before/conj you did, so it/object is mine," {said} {hero}[, {cross}|]. ;
  h>f"I am [older|taller|quicker|stronger], so I will {toy.use} first," {said} {hero}[, {cross}|].
problem? = f>h"that/pron is not fair/adj, because my {friend.hands} touched the {toy} first," {answered}
  {friend}. ; f>h"you always go first, {hero}, and today I want to {toy.use}," {answered} {friend}.
problem = {they} pulled and tugged until <problem the {toy.full} [fell|flew|slipped|tumbled] into {mess}>. ;
  {hero} pulled, {friend} tugged, and with a [plop|splash|thump] <problem the {toy} landed in {mess}>.
problem = {friend} {friend.went} home {in_a_huff}[, and|.] {hero} had nobody to {chat}.
turn? = {hero} {looked} at the [dirty|muddy|messy] {toy} and thought of the [games|jokes|walks/noun] {he} had
  shared with {friend}. ; {hero} sat {spot.2} and soon knew that a {toy} is no fun without {friend}.
turn? = {he} washed the {toy} [in a bucket|in the stream|at the pump|in the brook] and dried {it} with
  {cloth}.
turn = h>f"I am sorry that I [shouted|pulled|grabbed the {toy}|pushed you], {friend}," {hero} said {softly}. ;
  h>f"I was {unkind}, {friend}, and I am sorry," said {hero}, holding out the {toy}.
turn = f>h"I am sorry too, {hero}, and I missed you more than any {toy.full}," {answered} {friend}. ; f>h"I
  was {unkind} too, {hero}, so let us begin again," {answered} {friend}.
ending = {they} took turns with the {toy.full} [{place.at}|{until_dusk}]. ; after that/pron, {hero} had the
  {toy} on [Monday|Tuesday|Wednesday], {friend} had {it} on [Thursday|Friday|Saturday], and on Sunday {they}
  {toy.used} together. ; h>f"one {toy} and two friends make a good {afternoon}," {hero} [liked to tell|often
  told] {friend} after that/pron.
""",
    "brave": """
opening = {friends}
want = {one_day}, {hero} was playing with {his} {toy.full} not far from {place} when {it}
  [vanished|disappeared|tumbled|slipped] into {fear}. ; on the way to {place.full}, {hero} dropped {his}
  {toy.full}[, and|.] {it} [rolled|tumbled|slid] [straight|right] into {fear}.
want = more than anything, {hero} wanted to <want get the {toy.full} back> [before supper|before dark/noun|at
  once].
problem = <problem {hero} was {afraid}>, and {fear} was {fear.look}. ; {fear} was {fear.look}, and <problem
  {hero} was {afraid}>.
problem = from inside came a {fear.sound}, and {hero}'s {knees} began to {shiver}. ; {hero} heard a
  {fear.sound}[, and|.] {his} {knees} began to {shiver}.
problem? = h>f"I want to <want get my {toy} back>, but I am [so/adv|much too|very] {scared}," {sighed} {hero}.
turn = f>h"while you look for the {toy}, {hero}, I will {encourage}," said {friend}. ; f>h"I will {encourage},
  and then you will know that I am near," {answered} {friend}.
turn = {hero} took a deep breath and {hero.went} into {fear}, counting {number} [slow|small|careful|shaky]
  steps. ; so {hero} {hero.went} into {fear}, {number} steps, then {number} more, {holding_tight}.
turn = there was the {toy.full}, and beside {it}, making the {fear.sound}, was only {fear.truth}! ; there lay
  the {toy.full}, and it was only {fear.truth} that/pron had made the {fear.sound}!
ending = {hero} {hero.went} out with the {toy.full}[, and|.] {friend} {friend.joy}.
ending? = f>h"<lesson to be brave> is to be {scared} and still get your {toy} back, {hero}," said {friend}. ;
  h>f"I was <lesson brave> because I could hear you, {friend}," said {hero}, and {he} {hero.joy}. ; then
  {hero} and {friend} {toy.used}, not at all/pron {scared} of {fear}.
""",
    "share": """
want = {one_day}, {helper} gave {hero} a {food.full}[, and|.] {it} smelled of {food.smell}. ; {one_day},
  {hero} [made|prepared] a {food.full} that/pron smelled of {food.smell}.
want = {hero} wanted to <want eat all/pron of the {food} alone>, so {he} carried {it} to {place.full} and sat
  down {spot.1}. ; h>"this {food} is <want all/adv for me>," {whispered} {hero}, and {he} hid {it} {place.at},
  {spot.1}.
want = {friends}
problem = just then {friend} {friend.went} by. f>h"what smells of {food.smell}, {hero}?" asked {friend}
  [hungrily|hopefully|eagerly]. ; soon {friend} came along[, and|.] <problem {friend.his} tummy rumbled> like
  {rumble}.
problem = h>f"I have nothing but {trifles}," {hero} {mumbled}, pushing the {food} out of sight. ;
  h>f"there/pron is <problem not enough/det {food} for two>," {hero} {mumbled}, {drooping}.
problem = {friend} {friend.went} away [with a sigh|without a crumb|hungry|sniffing the air], and <problem the
  {food.full} tasted of {dull}>. ; but without {friend}, <problem the first/adj mouthful of {food} tasted of
  {dull}>.
turn = {hero} {remembered} the [day|time|winter|summer] when {friend} had {kindness}. ; then {hero} thought of
  {friend}, who had once {kindness}.
turn? = {he} picked up the {food} and {hurried} past {place} until {he} found {friend} {spot.2}.
turn = h>f"please share my {food.full} with me, {friend}," {said} {hero}. ; h>f"I hid the {food} from you,
  {friend}, and that/pron was {unkind}," said {hero}, and {he} gave {friend} the [bigger|best|first/adj]
  [half|helping|part].
turn? = f>h"nobody has ever shared a {food.full} with me before/adv, {hero}," said {friend}. ; f>h"the {food}
  tastes even better because you [ran|came] back, {hero}," said {friend} {softly}.
ending = {they} finished the {food} {place.at}, and {hero} thought that <lesson half of {it} with {friend} was
  better than all/pron of {it} alone>. ; now {it} tasted of {food.smell} again, and {hero} and {friend}
  [ate|licked {their} lips|talked] {until_dusk}.
ending? = the next [day|morning|week], {friend} brought {hero} {a_gift}[, tied with {ribbon}|].
""",
    "build": """
opening = {friends}
want = {one_day}, {hero} {decided} to <want build a {craft.full}> {place.at}. ; h>f"let us <want build a
  {craft.full}> {place.at}," {hero} told {friend} {at_breakfast}.
want = {they} gathered {craft.parts} and [worked|hammered|hammered and sawed] {all_day}. ; {hero} found
  {craft.parts} {spot.1}, and {friend} brought {tools}.
problem = but when {hero} tried the {craft.full} for the first/adj time, <problem {craft.trouble}>. ; at first
  {hero} was [proud|very proud] of the {craft}, but then <problem {craft.trouble}>.
problem? = h>f"our {craft} is a [mess|flop|disaster], {friend}," {sighed} {hero}, {drooping}. ; {hero}
  {kicked} a {worn} {scrap}, because <problem the {craft} was no good at all/pron>.
turn = f>h"we could ask {helper}, who knows a lot about {lore}," said {friend}. ; {helper}, who happened to be
  {nearby}, came to look at the {craft}.
turn = e>h"do not give up, {hero}, but {craft.fix}," said {helper} {kindly}. ; e>h"a {craft} works well when
  you {craft.fix}, {hero}," {answered} {helper}.
turn = so {hero} and {friend} {craft.fixed}, just as/conj {helper} had said. ; {hero} {nodded}, {friend} held
  the [hammer|ladder|saw/noun|rope|lantern], and this time {they} {craft.fixed}.
ending = at last the {craft.full} was ready, and {hero} and {friend} {craft.used}[ {until_dusk}|]. ;
  {by_evening} {hero} and {friend} {craft.used}, and even {helper} wanted a turn.
ending? = h>f"a {craft} is worth building twice," {laughed} {hero}[, and {friend} {friend.joy}|]. ; {friend}
  painted two names, {hero} and {friend}, on the {craft} in {colour} letters. ; h>f"<lesson we did not give
  up>, {friend}, and now we have a {craft.full}," {cheered} {hero}.
""",
    "surprise": """
opening = {friends}
want = {friend}'s birthday was only {number} days away[, and|.] {hero} wanted to <want give {friend.him} a
  {toy.full}>. ; {hero} knew that {friend} had always wished for a {toy.full}, and so {he} {decided} to <want
  make one/noun>.
want = every [day|evening|morning|night] {he} crept to {place.full} and worked on the {toy} {spot.1}. ; with
  {cloth} and {tools}, {hero} worked on the {toy} {spot.1}, where nobody could see.
problem = {friend} {noticed} that {hero} was always {busy}[, and|.] <problem {friend} felt left out>. ;
  f>h"will you come to {place} with me, {hero}?" asked {friend}, but {hero} [had to go|was in a hurry|shook
  {his} head].
problem = f>h"<problem you never play with me now>, {hero}," said {friend}[, {sadly}|]. ; f>"perhaps <problem
  {hero} has forgotten me>," {whispered} {friend}, sitting {spot.2} with {trifles}.
problem? = {hero} almost told {friend} about the {toy.full}, but [{he} bit/verb {his} tongue|{he} kept quiet|a
  secret is a secret].
turn = on the [morning|evening|day] of {friend}'s birthday, {hero} hung {decorations} {spot.1}, and {helper}
  brought a [plum|carrot|honey|cherry] cake.
turn = h>f"{friend}, please close your eyes and follow me," {said} {hero}, leading the way to {place.full}. ;
  then {hero} {hurried} to {friend}. h>f"come with me to {place}, {friend}, and do not peek," {he} said
  {softly}.
turn = when {friend} looked, there was the {toy.full} {spot.1}, tied with {ribbon}. ; {friend} opened
  {friend.his} eyes, and there {it} was: a {toy.full} with {ribbon}!
ending = f>h"you did not forget me at all/pron, {hero}," {laughed} {friend}. ; f>h"so/adv this/pron is what
  you were hiding, {hero}, a {toy.full} for me," {said} {friend}.
ending = {friend} took the {toy} and {toy.used}, and {helper} shared out the cake. ; {friend} {friend.joy},
  {helper} shared out the cake, and everyone {toy.used}.
""",
    "weather": """
opening = {friends}
want = {one_day}, {hero} and {friend} took a {toy.full} to {place.full}, because {they} wanted to {toy.use}. ;
  {hero} had a {toy.full}, and {one_day} {he} set out with {friend} to {toy.use} {place.at}.
problem = but {hero} and {friend} had [hardly|barely|only just] started when <problem {weather.comes}>. ;
  {friend} {pointed} at the sky above {place}, and <problem {weather.comes}>.
problem? = {weather.harm}, and {hero} held the {toy.full} [tight/adv|tightly|safely] in {his} {hero.hands}.
problem? = h>f"<problem the {weather} has spoiled our {afternoon}> with the {toy}, {friend}," {sighed} {hero}.
  ; h>f"why must a {weather} come today, {friend}?" {sighed} {hero}, {drooping}.
turn = f>h"quick, {hero}, let us hide {shelter} until the {weather} is over," {said} {friend}. ; {friend}
  pulled {hero} along, and {they} {hurried} to a dry place {shelter}.
turn = there {hero} and {friend} shared {snack} and {pastime}. ; to pass the time, {hero} and {friend}
  {pastime} and ate {snack}.
turn = after {a_while}, {hero} {noticed} that {weather.goes}. ; {number} [songs|stories|riddles|jokes|games]
  later, {friend} {noticed} that {weather.goes}.
turn? = f>h"look, {hero}, {place} is all/adv [fresh|clean|sparkling|shiny|new] now," {said} {friend}.
ending = {weather.after}, out came the {toy}, and {hero} and {friend} {toy.used}. ; so {hero} and {friend}
  {hurried} back with the {toy} and {toy.used}.
ending? = h>f"I will remember how we {pastime} in the {weather}, {friend}," said {hero}. ; h>f"when the next
  {weather} comes, {friend}, we will bring {snack} again," {laughed} {hero}. ; f>h"I liked the {weather}
  almost as much as the {toy}, {hero}," said {friend}.
""",
    "helping": """
want = {one_day}, {hero} {hero.went} out to <want bring {helper} a {food.full}>, because {helper} had
  {ailment}. ; {helper} was waiting for a {food.full}[, and|.] {hero} had promised to <want bring {it} by
  [noon|dusk|supper]>.
want = {friends}
want? = {friend} came too, and the {food} smelled of {food.smell} all the way to {place}.
problem = on the way past {place.full}, {hero} heard {a_cry}: {spot.1}, <problem a {adrift} {creature}
  {creature.trouble}>. ; but {spot.1}, not far from {place}, <problem a {adrift} {creature}
  {creature.trouble}>.
problem? = f>h"<problem if we stop for the {creature}, {hero}, the {food} will be late>," said {friend}
  {softly}. ; {hero} looked at the {food}, and then at the {creature}, and knew that <problem {he} would be
  late>.
turn = h>f"the {food} can wait, {friend}, but a {adrift} {creature} cannot," {said} {hero}. ; {hero} put down
  the {food.full} and {hero.went} to the {creature}.
turn = {gently}, {hero} {creature.rescue}, while {friend} {soothed} the {creature}. ; {friend} {soothed} the
  {creature}, and {hero} {gently} {creature.rescue}.
turn = x>h"thank you, {hero}, and now let me show/verb you a {shortcut}," said the {creature}. ; x>h"because
  you stopped for me, {hero}, I will show/verb you a {shortcut}," said the {creature}.
ending = the {creature} led the way, and {hero} and {friend} reached {helper} [just in time|with time to
  spare]. ; thanks to the {shortcut}, the {food} was only a little late and still {fresh_food}.
ending = e>h"<lesson kindness is never late>, {hero}," said {helper}, and shared the {food} with {hero} and
  {friend}. ; {helper} laughed at the story of the {creature}, and {hero} and {friend} had some of the {food}.
""",
    "skill": """
want = all the others {region} could {skill}[, and|.] {hero} wanted to <want {skill}> too. ; {one_day}, {hero}
  saw {helper} {skill} {place.at}[, and|.] {he} {decided} to <want learn to {skill}>.
want = {friends}
problem = {hero} tried {all_day} {place.at}, but <problem {skill.fail}>. ; {number} times {hero} tried
  {place.at}, and {number} times <problem {skill.fail}>.
problem = h>f"I will never <want {skill}>, {friend}," {sighed} {hero}[, {drooping}|]. ; h>f"<problem I am no
  good at {skill.doing}>, {friend}," {hero} {mumbled}[, {drooping}|].
turn = e>h"nobody can {skill} on the first/adj day, {hero}," said {helper}. e>h"the secret is to {skill.tip},
  [again and again|day after day|and not to hurry|and to smile/verb]." ; e>h"when I was small, {hero}, I could
  not {skill} until I learned to {skill.tip}," said {helper}.
turn? = f>h"I will practice with you every {afternoon}, {hero}," said {friend}.
turn = so {hero} practiced {days_passed}, and each time {he} remembered to {skill.tip}. ; {days_passed} {hero}
  practiced, and {friend} {encouraged}.
ending = then, {one_day}, {hero} {skill.done}, and {friend} {friend.joy}! ; {on_a_day}, {hero} {skill.done} in
  front of {friend} and everyone {region}.
ending = h>f"{skill.doing} is easy when a friend helps, {friend}," {laughed} {hero}. ; e>h"you see, {hero},
  <lesson practice/noun is a kind/noun of magic>," said {helper}[, and {hero} {hero.joy}|]. ; h>e"I only had
  to {skill.tip}," {hero} told {helper} {proudly}.
""",
    "strange": """
opening = {friends}
want = {one_day}, {place.at}, {hero} found {find.full} {spot.1}, and {find.did}. ; {one_day}, {hero} and
  {friend} were walking {place.at} when {they} saw {find.full} {spot.1}.
want = h>f"I want to know <want whose {find} this/pron is>, {friend}," {whispered} {hero}. ; {hero} had never
  seen such a {find}, and {he} asked {friend} <want where {it} came from>.
problem = f>h"perhaps {it} is {find.guess}," said {friend}[,|.] but <problem {hero} was not sure>. ; f>h"I
  think the {find} fell from {far_away}," {whispered} {friend}, and <problem {hero} felt
  [puzzled|unsure|curious]>.
problem? = {they} asked [everybody|everyone|all the neighbors] {region}, but <problem nobody had ever lost a
  {find}>. ; {hero} asked {helper}, who knew a lot about {lore}, but even {helper} <problem did not know the
  {find}>.
turn = so {hero} made a sign that/pron said who had found the {find}, and {they} [waited|sat down|kept
  watch/noun|settled down] {spot.1}. ; {hero} {decided} to wait {spot.1} with the {find}, and {friend} brought
  {snack}.
turn = {at_dusk}, {find.owner} came by, {searching}. ; {at_dusk}, {they} heard a {tiny} voice, and there was
  {find.owner}, {searching}.
turn = x>h"oh, that/pron is {find.purpose}," [cried|exclaimed|squeaked] the {tiny} stranger/stranger, and
  {hero} handed over the {find}.
ending = x>h"most/adj folk would have kept my {find}, {hero}, but you waited," said the stranger/stranger, and
  gave {them} {a_gift}. ; to say thank you, the stranger/stranger gave {hero} {a_gift} and gave {friend}
  {a_gift}.
ending? = h>f"<lesson a {find} is best with its owner>, {friend}," said {hero}. ; {hero} and {friend} watched
  the {find} go home.
""",
    "night": """
opening = {friends}
want = after a long day {place.at}, {friend} came to stay, and {hero} wanted to <want fall asleep beside {his}
  {toy.full}>. ; {on_a_night}, after a long day {place.at}, {hero} put down {his} {toy.full} and {wanted} to
  <want fall asleep>.
problem = but as soon as/conj {hero} blew out the [candle|lamp|lantern], <problem {noise.heard}>. ; {hero}
  pulled {the_covers} up to {his} [chin|nose|ears|eyes][, and|.] then <problem {noise.heard}>.
problem = h>f"I think I hear {noise.guess}, {friend}," {whispered} {hero}, hugging {his} {toy.full}. ;
  h>f"what if it is {noise.guess}, {friend}?" {whispered} {hero}.
problem? = f>h"or {noise.guess} with a {worn} {scrap}," {whispered} {friend}.
turn = {hero} wanted to hide, but {he} was {number} years old now, so {he} lit {a_light}. ; f>h"let us look,
  {hero}, and I will hold {a_light}," said {friend} {softly}.
turn = {hero} {hero.went} across the [cold|creaky|dark|dusty] floor, and {friend} {friend.went} behind {him}.
  ; {hero} tucked {his} {toy.full} under one arm, and the two friends crept [closer|nearer|along].
turn = {number} steps later {hero} saw that it was not {noise.guess} at all/pron, but only {noise.truth}! ;
  h>f"look, {friend}, it is only {noise.truth}," {laughed} {hero}, and {he} nearly dropped {his} {toy}.
ending = {they} laughed until {the_covers} shook, and {friend} {noise.settled}. ; {hero} {noise.settled}, and
  then it was quiet again.
ending = h>f"<lesson things are smaller when you look at them>, {friend}," {mumbled} {hero} {sleepily}. ; soon
  {friend} was snoring, and {hero} lay [warm and safe|half/adv asleep|smiling] beside {his} {toy.full}.
""",
    "truth": """
opening = {friends}
want = {helper} was busy {place.at}[, and|.] {hero} wanted to <want surprise {helper.him} by/prep {chore}>. ;
  {one_day}, {hero} and {friend} went to visit {helper} {place.at}[, and|.] {hero} wanted to <want help
  by/prep {chore}>.
problem = but {hero} {blundered}, and <problem {helper}'s {treasure.full} {treasure.broke}>. ; all/pron went
  well until {hero} {blundered} and <problem the {treasure.full} {treasure.broke}>.
problem = quickly {he} hid the {treasure.full} {spot.1} and covered {it} with {cloth}. ; {his} {knees} began
  to {shiver}, and {he} hid the {treasure.full} {spot.1}.
problem? = h>f"please do not tell {helper} about the {treasure}, {friend}," {whispered} {hero}[, {drooping}|].
  ; h>f"<problem {helper} will never trust me again>, {friend}," {sighed} {hero}.
turn = f>h"{helper} loves you more than any {treasure}, {hero}," said {friend}, who always <lesson told the
  truth>. ; f>h"a secret gets heavy, {hero}, like {a_load}," said {friend} {softly}.
turn? = {hero} thought about it {all_day}, and the secret felt as heavy as {a_load}. ; at supper, even {snack}
  tasted of {dull}, and {hero} knew what {he} had to do.
turn = h>e"I broke your {treasure.full}, and I am sorry," {hero} told {helper} {softly}. ; h>e"I
  [dropped|broke] your {treasure.full}, and then I hid {it}," {hero} {mumbled} to {helper}.
ending = e>h"a {treasure} can be mended, {hero}, and I am glad that you <lesson told the truth>," said
  {helper}. ; {helper} hugged {hero}. e>h"I once broke [a jug|a lamp|two plates|a window|a whole shelf] too,
  {hero}," said {helper}.
ending = {they} mended the {treasure.full} with {glue}, and {hero} finished {chore} with {friend}. ; together
  {hero}, {friend} and {helper} mended the {treasure}, and now {it} {treasure.now}.
""",
}

# What some plots are about: tables as in lexicon.py.
TABLES = """
craft = name:object ; parts ; trouble:problem ; fix~fixed ; used:want // cart ; four wheels and a old crate ;
  the wheels wobbled and fell off ; push~pushed a peg through every wheel ; raced it/object down the hill //
  swing/noun ; two ropes and a [smooth|thick] plank ; the ropes slipped and the seat tipped over ; tie~tied a
  double knot on each side ; swung up to the leaves in it/object // treehouse ; {number} planks and a bag of
  nails ; the floor tilted and everything slid out ; set a strong post under each corner ; had supper in
  it/object // windmill ; paper sails and a long pole ; the sails would not turn/verb ; rub~rubbed a little
  butter on the middle ; watched it/object spin and hum // birdhouse ; planks, nails and straw ; the roof
  leaked and no bird came ; cover~covered the roof with wax ; counted the birds around it/object // robot ;
  {number} cans and a bit of wire ; its/object head rolled off and rattled away ; bend~bent the wire into a
  collar ; marched behind it/object // stage ; [curtains|ribbons] and {number} boxes ; the curtain fell down
  with a flop ; hang~hung the curtain from a straight/adj stick ; put on a play/noun in it/object // sled ;
  two boards and a [broad|soft] seat ; the boards stuck and would not slide ; bend~bent the boards up in front
  ; slid down the grass on it/object // fort ; {number} logs and a flag ; the walls leaned and fell flat ;
  dig~dug a ditch for the logs ; guarded it/object
fear = name:problem ; look ; sound:problem ; truth:problem // the old cellar ; as black as ink ; slow drip ; a
  leaky barrel // the hollow tree ; as dark as a pocket ; scratchy whisper/noun ; two sleepy bats // the damp
  cave ; cold and full of echoes ; low moan ; the wind in a crack // the empty barn ; tall and full of shadows
  ; long creak ; a loose door // the stone tunnel ; narrow and dark ; hollow clang ; a tin can/noun in a
  puddle // the dusty attic ; grey with cobwebs ; soft flapping ; a plump pigeon // the ruined/adj tower ;
  crooked and gloomy ; sad hoot ; a young owl with a cold/noun // the forgotten/adj mill ; crooked and silent
  ; dull thud ; a worn sack // the coal shed ; as black as a crow ; faint scrape ; a lost/adj hen
weather = name:problem ; comes:problem ; harm ; goes ; after // storm ; a storm rolled in with
  [grumbling/adj|booming] thunder ; lightning [flashed|crackled] ; the thunder had grumbled itself to
  sleep/noun ; a rainbow stood over everything // shower ; a shower began to [pour|drum/verb] down ; every
  puddle [jumped|danced] ; the last drops were falling ; everything sparkled // wind ; a wild wind came
  howling over the roofs ; hats and leaves went flying ; the wind had blown itself out ; the air was still/adj
  // fog ; a thick fog crept in from the sea ; nobody could see past the nearest tree ; the fog had lifted ;
  the sun peeped out // snowstorm ; a snowstorm came in heavy white flakes ; the paths turned white and
  slippery ; the clouds had drifted off ; the whole world glittered // hailstorm ; a hailstorm came rattling
  down ; white stones bounced off the ground ; the hailstones had melted into puddles ; a robin sang //
  drizzle ; a gloomy drizzle soaked the path ; drops ran down every leaf ; the drizzle had given up ; steam
  rose/verb from the path
creature = name:stranger ; trouble:problem ; rescue // ladybug ; had fallen into a bucket of milk ; lifted
  it/stranger out on a leaf // chick ; had tumbled from its/stranger nest ; carried it/stranger back to the
  nest // beetle ; was lying on its/stranger back/noun ; tipped it/stranger over with a straw // wren ; was
  stuck in the brambles ; bent back the thorns // butterfly ; was caught in a sticky web ; brushed the threads
  away // calf ; had sunk deep/adv in the mud ; laid down planks and pulled // snail ; was stranded on a hot
  stone ; moved it/stranger into the cool shade // crab ; was trapped under a crate ; lifted the crate with a
  stick // bumblebee ; was too cold to fly ; warmed it/stranger in the sun // swan ; had a fishing line around
  its/stranger neck ; untied the line
skill = name:want ; doing:want ; fail:problem ; tip ; done:want // whistle a tune ; whistling a tune ; only
  damp air came out ; blow softly and not too hard ; whistled a tune from start to finish // juggle ; juggling
  ; the apples bounced off {his} head ; watch the top of the circle ; juggled {number} apples // jump rope ;
  jumping rope ; the rope tied itself around {his} ankles ; listen for the slap of the rope ; jumped {number}
  times in a row // turn/verb a cartwheel ; turning cartwheels ; {he} landed flat on {his} back/noun ; look at
  the ground between both hands ; turned a perfect cartwheel // walk on stilts ; walking on stilts ; {he}
  tumbled into the flowers ; keep both knees loose ; walked {number} steps on stilts // knit ; knitting ; the
  wool became one enormous knot ; count every stitch ; knitted a whole sock // play the fiddle ; playing the
  fiddle ; the strings screeched like a cat ; hold the bow like a feather ; played a lullaby on the fiddle //
  dance the polka ; dancing the polka ; {his} legs went left/adv and {his} body went right ; count to three
  and hop ; danced the polka without a stumble // ride a bicycle ; riding a bicycle ; the bicycle went
  straight into a bush ; look far ahead instead of down ; rode the bicycle in a perfect ring/noun // fold a
  paper bird ; folding paper birds ; the paper looked like a squashed/adj sandwich ; press every fold/noun
  with care ; folded {number} paper birds // paint/verb a horse ; painting horses ; each horse looked like a
  potato ; look twice and paint/verb once ; painted a horse that/pron almost galloped // bake bread ; baking
  bread ; the bread was as hard/adj as a brick ; wait until the dough is soft ; baked a loaf as light/adj as a
  cloud
find = name:object ; full:object ; did ; guess ; owner:stranger ; purpose // egg ; a glowing egg ; it/object
  hummed like a kettle ; a fallen/adj star ; a firefly in a nightcap ; my bedside lamp // key ; a tiny golden
  key ; it/object shivered whenever the wind blew ; the key to a toy castle ; a beetle with a ring/noun of
  keys ; the key to my winter pantry // hat ; a velvet hat no bigger than a thimble ; it/object bowed when
  nobody looked ; the hat of a very small king ; a cricket with a fiddle ; my concert hat // bottle ; a dusty
  green bottle ; it/object whispered like the sea ; a ship for ants ; a snail in a sailor collar ; the bottle
  where I keep my letters // map ; a folded/adj map ; its/object lines moved like worms ; a map to the den of
  a dragon ; a worm with spectacles ; my map of all the best puddles // stone ; a warm blue stone ; it/object
  sang in the rain ; a piece of the sky ; a lizard in a shawl ; the stone that/pron warms my bed // clock ; a
  round clock with one hand ; it/object ticked backward ; a clock that/pron counts naps ; a dormouse in
  pajamas ; the clock that/pron tells me when to sleep // teacup ; a teacup with painted/adj wings ; it/object
  filled itself with dew ; a bath for a fairy ; a moth with a tray ; the cup that/pron I lost on Tuesday //
  ladder ; a ladder made of grass ; it/object grew in the rain ; a ladder to the moon ; a spider with {number}
  socks ; the ladder to my attic // boot ; a single red boot ; it/object tapped its/object toe ; the boot of a
  lost/adj giant ; a stork on one leg ; the boot that/pron I wear on Sundays
noise = heard:problem ; guess:problem ; truth:problem ; settled // something went tap, tap at the window ; a
  goblin with long nails ; a branch of the plum tree ; tied back the branch with string // something squeaked
  under the floor ; a ghost in tight shoes ; a vole with a walnut ; gave the vole a crust // something sighed
  in the chimney ; a very sad dragon ; the wind in the bricks ; put a pillow up the chimney // something
  rattled at the door ; a skeleton on skates ; a loose latch ; closed the latch // something went plop, plop
  in the corner ; a crab in slippers ; a leak in the roof ; put a bucket under the leak // something scratched
  at the wall ; a wolf with a fork ; the ivy on the bricks ; closed the curtain // something hummed above the
  bed ; a flying/adj kettle ; a moth by the lamp ; let the moth out // something thumped on the stairs ; a
  giant with one boot ; a apple from the basket ; put the apple back in the basket // something snored behind
  the cupboard ; a troll with a cold/noun ; a pigeon on a heap of hats ; covered the pigeon with a hat
treasure = name:object ; full:object ; broke:problem ; now // teapot ; [blue|painted/adj] teapot ; fell and
  lost its/object spout ; poured tea with a lisp // vase ; [tall|glass] vase ; cracked from top to bottom ;
  had a crack like a smile // clock ; [round|wooden] clock ; stopped with a sad clang ; rang {number} times at
  noon // plate ; [round|painted/adj] plate ; broke into {number} pieces ; looked like the sun behind branches
  // lamp ; [green|reading] lamp ; tumbled off the table ; shone a little crooked/adv // chair ;
  [rocking|painted/adj] chair ; lost a leg ; rocked with a funny bump // picture ; [garden|painted/adj]
  picture ; dropped to the floor ; hung lower, where {hero} could see it/object // ship ; [wooden|glass] ship
  ; lost {number} sails ; had sails made of handkerchiefs // jug ; [milk|striped] jug ; lost its/object handle
  ; made a fine home/noun for daisies
"""
