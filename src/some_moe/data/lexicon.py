"""The words of the stories: who and what they are about, their turns of phrase, and their parts of speech.

Phrases use the notation of plots.py; alternatives stand between semicolons, the common ones first. A table
has its entries between "//"; the first one names the columns and, after a colon, the role of their words.
"""

# Names of heroes and friends by pronoun, and of helpers.
NAMES = """
she = Mia Lily Anna Rosie Ella Nora Ruby Daisy Molly Ivy Hazel Clara Lucy Poppy Zoe Maya Luna Ada Emma Tilly
  Freya Bea Nell Olive Pearl Greta Mabel Elsie Dora Sadie Fern Clover Juniper Willa Marigold Penny Tansy Minna
  Etta Suki Amina Priya Noor Yuki Leila Saffron Flora Hattie Lottie Peony Cora Dilly Winnie Maisie Thea Orla
  Petra Romy Pippa Jemima
he = Leo Tom Ben Max Sam Oliver Theo Finn Jack Henry Milo Otto Hugo Felix Toby Arlo Ned Jasper Oscar Rory Pip
  Basil Bruno Teddy Archie Barnaby Wilbur Alfie Monty Ollie Kit Ravi Omar Kenji Mateo Tariq Emil Anton Bramble
  Thistle Acorn Pebble Nutmeg Button Biscuit Rowan Alder Flint Sorrel Quill Barley Tuck Hob Jonah Caspar Ezra
  Nico Percy Digby Humphrey
elder = Willow Finch Plum Pepper Oakley Thimble Birch Bean Crumb Dumpling Fig Heather Moss Turnip
"""

# Helpers by pronoun; "+" stands for an elder name.
HELPERS = """
she = Grandma + ; Aunt + ; Farmer + ; the old owl ; the kind librarian ; the wise goose ; Granny + ; the
  village teacher
he = Grandpa + ; Uncle + ; Captain + ; the old miller ; the wise tortoise ; the kind baker ; the gardener ;
  Professor + ; the shepherd
"""

# Where a story happens, by kind of place: preposition, article, [describing words], noun.
PLACES = """
wild = in the [sunny|wide|green] meadow ; on the [windy|steep|grassy] hill ; in the [leafy|deep|quiet] forest
  ; by the [quiet|round|shady] pond ; by the [lazy|silver|winding] river ; in the [misty|narrow|peaceful]
  valley ; in the [old|apple|shady] orchard ; by the [clear|chattering|rocky] stream ; by the
  [blue|calm|misty] lake ; in the [golden|muddy] field ; on the [sandy|windy|rocky] beach ; in the
  [secret/adj|bright] clearing ; by the [singing/adj|tall] waterfall ; on the [tiny|green] island
town = at the [busy|crowded|noisy] market ; in the [village|sunny] square ; in the [leafy|quiet|green] park ;
  at the [windy|old|busy] harbor ; in the [empty|dusty] schoolyard ; on the [stone|narrow] bridge ; at the
  [busy|sleepy] station ; in the [new|noisy] playground ; at the [summer|harvest] fair ; on the
  [crooked|steep] lane ; by the [stone|round] fountain
yard = in the [vegetable|tangled|sunny] garden ; in the [muddy|noisy|busy] farmyard ; by the [red|warm] stable
  ; in the [grassy|tiny] backyard ; by the [noisy|painted/adj] henhouse ; in the [big|sunny] pumpkin patch ;
  behind the [red|great] barn ; in the [rose|flower] garden
"""

# Where things lie, hide or are waited for, by kind of place.
SPOTS = """
wild = in the tall grass ; behind the mossy log ; behind the [round|grey] boulder ; beside the hollow oak ;
  among the ferns ; under the bramble bush ; between two twisted/adj roots ; beside the old stump ; by the
  crooked willow ; beside a heap of leaves ; on the flat stone ; among the bluebells ; by the stepping stones
  ; next to the wild mint ; beside the fallen/adj birch ; behind the broken/adj gate ; at the foot of the
  [tallest|oldest] pine
town = under the green bench ; beside the pump ; near the flower stall ; behind the barrels ; on the stone
  steps ; by the lamppost ; next to the mailbox ; behind the statue ; between two crates ; at the foot of the
  clock tower ; by the iron gate ; beside the rain barrel ; under the chestnut tree ; beside the toy shop
yard = behind the shed ; behind the wheelbarrow ; beside the woodpile ; beside the strawberry bed ; among the
  cabbages ; behind the water barrel ; by the scarecrow ; beside the watering/noun can/noun ; between the bean
  poles ; under the rhubarb leaves ; behind the haystack ; beside the sunflowers ; behind the rose bush ; in
  the lavender ; under the pear tree
"""

# What heroes and friends can be, girl and boy last; "own" is their role, and "{his}" their pronoun.
KINDS = """
kind:own ; look:own ; went ; hands ; feature ; joy //
rabbit ; [brown|white|spotted] ; hopped ; paws ; [long|floppy|soft] ears ; thumped {his} foot for joy //
mouse ; [grey|tiny|brown] ; scurried ; paws ; [round|pink] ears ; squeaked for joy //
fox ; [red|young] ; trotted ; paws ; a [bushy|white] tail ; swished {his} tail //
bear ; [brown|shaggy|plump] ; lumbered ; paws ; a [round|big] tummy ; did a wobbly dance/noun //
squirrel ; [red|grey] ; scampered ; paws ; a [fluffy|bushy] tail ; flicked {his} tail //
hedgehog ; [prickly|spotted] ; shuffled ; paws ; [neat|brown] prickles ; rolled into a happy ball //
badger ; [plump|young] ; plodded ; paws ; a [striped|snowy] nose ; gave a merry grunt //
otter ; [young|brown] ; scampered ; paws ; [long|twitchy] whiskers ; turned a somersault //
duckling ; [yellow|fluffy] ; waddled ; wings ; [soft|bright] feathers ; quacked {number} times //
frog ; [green|spotted] ; leaped ; hands ; [long|springy] toes ; croaked with joy //
turtle ; [green|wrinkled] ; crawled ; hands ; a [shiny|striped] shell ; stretched {his} neck and beamed //
kitten ; [ginger/adj|striped|black] ; padded ; paws ; [green|golden] eyes ; purred like a kettle //
puppy ; [spotted|golden|scruffy] ; bounded ; paws ; a [wet|cold] nose ; wagged {his} tail //
lamb ; [woolly|white] ; skipped ; hooves ; [soft|curly] wool ; kicked up {his} heels //
goat ; [white|bearded] ; trotted ; hooves ; [short|curly] horns ; leaped high/adv into the air //
pony ; [brown|spotted] ; trotted ; hooves ; a [silky|golden] mane ; tossed {his} mane //
piglet ; [pink|muddy] ; trotted ; trotters ; a [curly|short] tail ; gave a happy snort //
mole ; [black|dusty] ; shuffled ; paws ; a [pink|pointed] nose ; wiggled {his} nose //
raccoon ; [grey|young] ; crept ; paws ; a [striped|bushy] tail ; rubbed {his} paws together //
beaver ; [busy|brown] ; waddled ; paws ; a [flat|broad] tail ; slapped {his} flat tail //
penguin ; [plump|young] ; waddled ; wings ; a [shiny|snowy] tummy ; flapped both wings //
donkey ; [grey|shaggy] ; trotted ; hooves ; [long|drooping] ears ; gave a cheerful bray //
girl ; [freckled|barefoot|tall|small] ; ran ; hands ; [two braids|rosy cheeks|a gap between {his} teeth] ;
  clapped {his} hands //
boy ; [freckled|barefoot|tall|small] ; ran ; hands ; [messy hair|rosy cheeks|a gap between {his} teeth] ;
  clapped {his} hands
"""

# One entry of a table is drawn for a story: {toy.use} is the column "use" of its toy, and {toy} its "name".
# "fly~flew" in a column "use~used" is "fly" in the one and "flew" in the other.
TABLES = """
trait = name:trait ; habit:trait ; again:trait // curious ; asked the moon a question every night ; asked the
  moon {number} new questions // cheerful ; sang to the kettle every morning ; sang to the kettle at the top
  of {his} voice // tidy ; lined up {number} pebbles on the windowsill each day ; lined up {number} pebbles
  and added one more/adj // dreamy ; gave every cloud a name ; gave the biggest cloud a new name // chatty ;
  talked to spoons, stones and spiders ; told the spoons and the spiders all/adv about it // careful ; looked
  {number} times before every step ; looked {number} times and then jumped into bed // hungry ; carried
  {number} biscuits in each pocket ; ate the last of the {number} biscuits // sleepy ; took {number} naps a
  day ; took the longest nap of the year // stubborn ; never took the short way home ; took the long way home,
  just as/conj always // gentle ; stepped around every ant ; wished every ant a good night // playful ; turned
  every broom into a horse ; rode the broom {number} times around the house // clumsy ; tripped over {his}
  own/adj shadow ; tripped over {his} own/adj shadow and only giggled // patient ; could watch a snail for
  {number} hours ; sat down to watch a snail cross/verb the path // polite ; said good morning to every gate ;
  said good night to every gate // forgetful ; tied {number} knots in a handkerchief ; untied the {number}
  knots one by one // musical ; drummed on every pot and pan ; drummed a new march/noun on the biggest pan //
  thoughtful ; wrote {number} lines in a notebook each night ; wrote {friend}'s name in the notebook // shy ;
  always wore a wide hat to hide under ; hung up the wide hat and did not need it // quick ; raced the wind to
  the gate and back ; raced the wind to the gate and won // jolly ; knew {number} jokes about turnips ; told
  {number} jokes about turnips
toy = name:object ; stuff:object ; use~used:want // kite ; [paper|silk] ; fly~flew it/object // ball ;
  [rubber|leather] ; kick~kicked it/object about // drum ; [tin|wooden] ; tap~tapped a march/noun on it/object
  // puppet ; [wooden|velvet] ; put on a show with it/object // sailboat ; [wooden|tin] ; sail~sailed
  it/object in a puddle // lantern ; [paper|brass] ; march~marched in a parade with it/object // flute ;
  [silver|wooden] ; play~played it/object for the birds // whistle/noun ; [tin|clay] ; blow~blew a tune on
  it/object // wagon ; [wooden|tin] ; fill~filled it/object with pinecones // book ; [cloth|leather] ; read
  it/object out loud/adv // blanket ; [woolen|cotton] ; make~made a tent with it/object // umbrella ;
  [silk|paper] ; twirl~twirled it/object like a dancer // hoop ; [willow|wooden] ; roll~rolled it/object along
  the path // doll ; [cloth|wooden] ; have~had a tea party with it/object // telescope ; [brass|silver] ;
  look~looked at the clouds through it/object // basket ; [willow|straw] ; fill~filled it/object with petals
  // bell ; [brass|silver] ; ring~rang it/object // marble ; [glass|clay] ; roll~rolled it/object in the dust
  // crown ; [paper|tin] ; play~played kings and queens with it/object // mask ; [paper|feather] ; play~played
  pirates with it/object // trumpet ; [brass|tin] ; blow~blew it/object // fiddle ; [brown|wooden] ;
  play~played a jig on it/object // paintbox ; [tin|wooden] ; paint/verb~painted a rainbow with it/object //
  net ; [string|cotton] ; chase~chased butterflies with it/object // bucket ; [tin|wooden] ; make~made mud
  castles with it/object // pinwheel ; [paper|silk] ; watch~watched it/object spin // train ; [tin|wooden] ;
  drive~drove it/object along the path // scarf ; [woolen|silk] ; dance~danced with it/object // teapot ;
  [tin|clay] ; pour~poured pretend/adj tea from it/object
food = name:object ; full:object ; smell:object // pie ; [warm|golden|fat] [blackberry|apple|rhubarb] pie ;
  sugar and [butter|lemon] // cake ; [tall|sticky] [carrot|honey|almond] cake ; [vanilla|cinnamon] and honey
  // soup ; [pot|bowl] of [pumpkin|onion|bean] soup ; onions and [pepper|garlic] // bread ; [warm|round] loaf
  of [walnut|raisin] bread ; [butter|flour] and warm nuts // pudding ; [steaming|wobbly] [plum|rice|lemon]
  pudding ; cream and [sugar|lemon] // jam ; jar of [cherry|plum|strawberry] jam ; summer and [berries|roses]
  // cheese ; wheel of [soft|yellow] cheese ; hay and [cream|salt] // stew ; [pot|kettle] of
  [mushroom|turnip|bean] stew ; [garlic|pepper] and smoke // porridge ; bowl of [warm|steaming] porridge ;
  [honey|milk] and brown sugar // tart ; [golden|sweet] [pear|cherry|lemon] tart ; [cherries|pears] and cream
"""

# Facts of a story, with their role after a colon: drawn when first needed, then always the same.
FACTS = """
home:home = in a [tiny|crooked|snug|yellow|narrow] [cottage|house|cabin|hut] [by the mill|at the edge of the
  wood|on Cherry Lane|behind the school|near the old bridge|under a big oak|between two hills|beside the
  river|above the harbor|next to the bakery]
region: = in the village ; in the valley ; for miles around ; on the hillside ; in the neighborhood ; in the
  whole town
number: = three ; five ; seven ; four ; six ; eight ; nine ; ten ; eleven ; twelve
toy.full:object = [{colour} {toy.stuff}|{colour}|{size} {colour}|{size} {toy.stuff}] {toy}
craft.full:object = [{size} {colour}|{colour}|{colour}|{size}] {craft}
snack: = [two|three|four] [plums|pears|carrots|sandwiches|buns] ; a [crust|slice] of [bread|cheese|melon] ; a
  [bag|handful] of [nuts|raisins|cherries|berries]
pastime: = told [ghost|silly|sleepy] stories ; sang a song about [pirates|soup|a goose|the moon] ; made up
  [funny|silly|long] names for the clouds ; played a guessing game ; asked {number} riddles ; drew
  [funny|round|sad] faces in the dust ; hummed a [slow|merry|wobbly] tune ; counted backward from a hundred
lore: = hammers and nails ; knots ; wood ; old things ; [kites|boats|bells] and [ropes|maps|wheels]
shelter: = under the [old|stone|low] bridge ; inside a hollow [oak|log] ; under a [hay|market|broken/adj] cart
  ; in a [dry|mossy] cave ; in the [shepherd|boat] hut ; under a [wide|flat] rock ; behind a [thick|tall]
  hedge
adrift:stranger = tiny ; frightened ; small ; shivering ; poor ; lonely ; worried ; weary
shortcut: = [secret/adj|narrow|hidden/adj|winding] [path|tunnel|track] [through the reeds|under the
  hill|behind the mill|along the wall|between the rocks]
chore:want = sweeping the floor ; dusting the shelves ; washing the windows ; polishing the spoons ; setting
  the table ; tidying the pantry ; folding the laundry ; scrubbing the steps ; feeding the hens
glue: = glue and [patience|string|a little luck] ; [glue|wax] and a bit of [wire|ribbon|thread|paper]
a_load: = a [sack|wagon|bucket|cart|basket] of [stones|potatoes|bricks|coal|wet sand]
"""

# Turns of phrase, drawn anew each time.
TURNS = """
opening = once upon a time, there/pron was a {trait} {hero.kind} named {hero}, who {trait.habit}. ; {hero} was
  a {trait} little {hero.kind} with {hero.feature}, and {he} {trait.habit}. ; {home} lived {hero}, a
  {hero.look} {hero.kind} who {trait.habit}. ; nobody {region} was as {trait} as {hero}, a {hero.look}
  {hero.kind} who {trait.habit}. ; this/pron is the story of {hero}, a {trait} {hero.kind} who {trait.habit}.
  ; long/adv ago, when {olden}, a {hero.kind} named {hero} lived {home}. {he} was very {trait} and
  {trait.habit}. ; h>"good morning, {greeted}," called {hero}, a {trait} {hero.kind} who {trait.habit}. ;
  {hero} the {hero.kind} liked {season} best/adv, and {he} {trait.habit}. ; have you ever met a {hero.look}
  {hero.kind} who {trait.habit}? {hero} was just such a {hero.kind}. ; there/pron was once a {hero.look}
  {hero.kind} called {hero}, who {trait.habit}. ; a {trait} {hero.kind} with {hero.feature} lived {home}.
  {his} name was {hero}, and {he} {trait.habit}. ; everyone {region} knew {hero}, the {hero.look} {hero.kind}
  who {trait.habit}.
closing = {that_night}, {hero} {trait.again}. ; {that_night}, {hero} the {hero.kind} {trait.again}, and
  {friend} laughed [until it hurt|out loud/adv|too]. ; {that_night}, {hero} {trait.again}, because a {trait}
  {hero.kind} is always [a little|] {trait}. ; and if you pass {place.full} [at dusk|in the evening|on a quiet
  day|early/adv enough], you may still see {hero} and {friend} [there|side by side]. ; {hero} and {friend}
  stayed the best of friends, and {hero} stayed just as {trait} as/prep before/adv. ; {friend} walked home
  under {evening_sky}, and {hero} {trait.again}. ; {friend} told everyone {region} about it, and {hero}, who
  was as {trait} as/prep ever, {trait.again}. ; that/det night, {hero} fell asleep smiling and dreamed of
  {dream}. ; that/det night, {friend} dreamed of {dream}, and {hero} dreamed of {friend}. ; above {place},
  {evening_sky} [seemed to smile/verb|shone softly|looked down] on {hero} the {hero.kind} and {friend} the
  {friend.kind}. ; {that_night}, {hero} {trait.again}, and everyone {region} slept well. the end. ; and what
  did {hero} the {hero.kind} do {that_night}? {he} {trait.again}, of course.
friends = {his} best friend was {friend}, a {friend.look} {friend.kind} with {friend.feature}. ; {hero}'s best
  friend, a {friend.look} {friend.kind} named {friend}, could {talent}. ; next door lived {friend}, a
  {friend.look} {friend.kind} who could {talent}. ; {hero} had a friend named {friend}, a {friend.kind} who
  could {talent}. ; almost every day {hero} played with {friend}, the {friend.look} {friend.kind} [next
  door|across the lane]. ; {hero} and a {friend.look} {friend.kind} named {friend} did nearly everything
  together.
colour = red ; blue ; green ; yellow ; white ; purple ; orange ; black ; striped ; pink ; spotted ; brown
size = little ; small ; big ; shiny ; old ; new ; fine ; bright ; tiny ; beautiful
one_day = one [bright|quiet|sunny|warm|golden|lazy|fine|cool] [morning|afternoon|day] ; on the first/adj day
  of [spring|summer|autumn|the holidays|April|June|October] ; one
  [Monday|Tuesday|Wednesday|Thursday|Friday|Saturday] [morning|afternoon] ; the day after the
  [fair|wedding|market|storm]
on_a_day = on [Saturday|Sunday|Friday] [morning|afternoon] ; on the day of the [festival|picnic|fair|parade] ;
  {number} days later ; one week later ; the very next [morning|Saturday|Sunday] ; at last, one
  [fine|windy|sunny] day
on_a_night = one [stormy|chilly|windy|dark|starry] night ; on [Friday|Saturday] night ; on the
  [longest|first/adj|coldest] night of [the year|winter|the holidays]
season = [frosty|rainy|bright|sleepy|windy] mornings in [spring|autumn|winter|April|May|October]
olden = rivers could still hum ; the hills were young ; foxes wore boots ; stars came down to drink ; trees
  told jokes ; kings kept bees ; wolves ate porridge ; maps had holes in them ; dragons carried the mail
greeted = sun ; world ; sparrows ; sky ; clouds ; everybody ; garden ; little spider
talent = whistle like a [blackbird|kettle|train] ; hum {number} tunes at once ; find mushrooms in the
  dark/noun ; walk along a [fence|rope|wall] ; tell the time from the [shadows|birds] ; name/verb every star
  in the sky ; balance a [pear|teacup|spoon] on {friend.his} nose ; sleep standing up ; do sums up to a
  [hundred|thousand|million] ; smell rain a day early/adv ; make anyone laugh ; spell {number} long words ;
  sing like a [goose|trumpet|squeaky door]
that_night = that/det night ; that/det evening ; before bed ; when the lamps were lit ; long/adv after supper
  ; as/conj the moon rose/verb ; when the house was quiet ; late/adv that/det night ; at bedtime ; by
  candlelight ; under {evening_sky}
evening_sky = a [silver|round|yellow|sleepy|thin] moon ; a [hundred|thousand|million] stars ; a
  [pink|purple|golden|starry] sky ; the [first/adj|bright] stars
dream = [flying/adj|dancing/adj|marching/adj|singing/adj]
  [teapots|turnips|elephants|umbrellas|pancakes|whales|pumpkins|dragons]
wanted = wanted ; hoped ; longed ; planned
at_breakfast = at breakfast ; over the fence ; on the way to school ; through the window ; at sunrise ; on the
  doorstep
noticed = noticed ; saw ; discovered ; found
sighed = sighed ; groaned ; whispered ; murmured ; sniffed
drooping = hanging {his} head ; blinking back a tear ; with a lump in {his} throat ; staring at the
  [ground|grass|clouds|floor] ; sinking down on a [stone|log|bench] ; with a long face ; wiping {his} nose ;
  kicking at the [dust|pebbles|leaves] ; close/adj to tears ; with a [trembling|wobbly] chin ; with a heavy
  heart ; hiding {his} face
cross = with a [dark|deep|fierce|stormy] frown ; stamping one foot ; folding {his} {hero.hands} ; sticking out
  {his} chin ; turning [red|pink|purple] ; with a [snort|sniff] ; in a [loud|sharp|grumpy] voice
trifles = [two|three|four|five|six] {bits} and a {worn} {scrap}
bits = acorns ; pebbles ; feathers ; buttons ; pinecones ; walnuts ; beetles ; shells ; petals
worn = rusty ; bent/adj ; cracked/adj ; muddy ; torn/adj ; soggy ; lonely ; squashed/adj
scrap = nail ; spoon ; glove ; sock ; cup ; coin ; candle ; mitten ; thimble ; fork ; shoe ; bottle
listened = listened ; nodded ; sat down close/adv by ; listened [carefully|closely|patiently] ; asked what was
  wrong
listen = help ; listen ; see what was wrong ; cheer {hero} up
remembered = remembered ; recalled
dawdle = watch a [ladybug|beetle|butterfly|snail] ; smell the [roses|mint|rain|hay] ; listen to a
  [cricket|robin|wren|bee] ; count the [clouds|swans|ants] ; chat with a [sparrow|snail|crow|gardener] ; pick
  a [daisy|rose|bluebell] ; rest for {number} minutes
hurried = hurried ; raced ; rushed ; ran
unharmed = [dusty|damp|sandy|warm] but [safe|whole] ; with a [snail|moth|ladybug|sparrow|cricket] asleep on
  top ; with a [leaf|petal|feather] stuck to {it} ; safe and sound ; as good as/prep new ; shining in the sun
  ; half/adv hidden by a [leaf|cobweb]
cheered = cheered ; cried ; shouted ; laughed ; exclaimed
said = said ; called ; cried
answered = answered ; replied ; said
until_dusk = until the sun went down ; until the first/adj stars came out ; until the sky turned
  [pink|golden|purple|orange|dark] ; until the crickets began to sing ; until the [church|school] bell rang ;
  until {their} legs were tired ; until it was time for [bed|supper|tea] ; until the moon rose/verb over
  {place} ; until the [owls|bats|fireflies] came out ; until {helper} called {them} home
afternoon = afternoon ; morning ; day ; evening
mess = a [deep|brown|cold|wide] puddle ; a patch of nettles ; a [muddy|deep] ditch ; a heap of [wet leaves|old
  straw] ; a barrel of [cold|green] water ; a bed of thistles
in_a_huff = in a huff ; without a word ; with a [sniff|snort|sob] ; and did not look back ; with {friend.his}
  nose in the air ; the long way around
chat = talk to ; laugh with ; play with ; sing to
looked = looked ; gazed ; peered ; stared ; glanced
cloth = a [soft|clean|dry] [rag|towel|cloth] ; a handful of [moss|straw] ; a old [shirt|sheet|curtain] ; a
  [cabbage|rhubarb] leaf ; a bit of [velvet|wool|silk]
softly = softly ; gently ; quietly ; kindly ; warmly ; in a low voice
unkind = unkind ; selfish ; greedy ; mean ; unfair
afraid = afraid of [the dark/noun|the cobwebs|the shadows|ghosts] ; too [frightened|nervous] to move ; as
  nervous as a [leaf|hen] ; [rather|very] [scared|frightened]
knees = knees ; legs ; {hero.hands} ; ears
shiver = shake ; shiver ; tremble ; wobble
scared = scared ; frightened ; afraid
encourage = sing the whole time ; hold the lantern high/adv ; count out loud/adv ; ring a [cow|brass|silver]
  bell ; hum your favorite song ; clap my {friend.hands} ; call your name ; beat on a pan ; whistle a
  [march/noun|jig|lullaby]
encouraged = cheered ; clapped ; counted out loud/adv ; kept score ; shouted hooray ; held the
  [towel|lantern|clock] ; never once laughed
holding_tight = holding {his} breath ; hugging the wall ; with one eye shut ; thinking of {friend} ;
  whispering {friend}'s name ; with {his} heart [drumming|thumping] ; humming a [brave|tiny|shaky] tune
laughed = laughed ; giggled ; chuckled ; beamed
whispered = whispered ; murmured ; muttered ; breathed
rumble = a [tired|grumpy|hungry] [train|bear|drum|cart]
mumbled = mumbled ; muttered ; murmured
dull = [dry|old|damp|cold|dull] [paper|sand|wood|chalk|straw|mud|bricks]
kindness = carried {him} home in the [snow|rain|dark/noun] ; shared {friend.his} [last|only/adj]
  [plum|sandwich|biscuit] ; stayed up all night because {hero} was [ill|sick|sad] ; knitted {him} a
  [scarf|hat|blanket] ; saved {him} the [last|best] seat ; taught {him} to [swim|skate|count] ; pulled {him}
  out of the [ditch|river|mud] ; lent {him} a [pillow|coat] ; found {his} lost/adj [mitten|tooth|shoe]
a_gift = a [jar|bag|basket|box|handful] of [nuts|berries|marbles|shells|almonds|cherries|sunflower seeds] ; a
  [carved/adj|painted/adj|polished/adj] [spoon|acorn|shell|walnut|bird|star]
ribbon = a {colour} [ribbon|bow] ; a bit of {colour} [string|wool] ; a blade of grass
decided = decided ; made up {his} mind
all_day = all day ; all morning ; from breakfast to lunch ; day after day ; for {number} days ; hour after
  hour ; every evening ; from dawn to dusk ; all week
tools = a [heavy|small] hammer ; a pot of [glue|paint] ; a [rusty|sharp] saw/noun ; scissors and [thread|glue]
kicked = kicked ; poked ; glared at ; threw down
nearby = passing by ; sweeping the path ; feeding the pigeons ; picking [beans|plums] ; hanging out the
  laundry ; mending a [net|fence|roof] ; napping in the shade
nodded = nodded ; smiled ; grinned ; winked
by_evening = by evening ; by [Friday|Saturday|Sunday] ; a hour later ; the very next day ; before long/adv
busy = busy ; in a hurry ; somewhere else ; out of breath ; covered in [dust|paint|glue]
sadly = with a sigh ; in a small voice ; kicking a pebble ; close/adj to tears ; with a sniff ; hanging
  {friend.his} head ; looking away
decorations = {number} paper [stars|lanterns|birds|moons] ; [ribbons|flags|bells] and [leaves|shells|feathers]
  ; a string of [ivy|daisies|roses|acorns|lanterns]
pointed = pointed/verb ; blinked ; frowned
a_while = a while/noun ; a hour ; a long time ; a short time ; {number} minutes
ailment = a [bad|dreadful] cold/noun ; a sore [throat|toe|back/noun] ; a twisted/adj ankle ; nothing left in
  the pantry ; no time to cook ; a broken/adj stove
a_cry = a [faint|small|sad|thin|tiny] [cry|squeak|sob|voice]
gently = gently ; carefully ; slowly ; patiently
soothed = calmed ; sang to ; talked softly to ; cheered up
fresh_food = good ; fresh ; perfect
kindly = kindly ; patiently ; with a [smile|wink|nod]
days_passed = day after day ; for {number} days ; for {number} weeks ; all through [April|May|June] ; every
  morning ; in rain and sunshine
proudly = proudly ; happily ; cheerfully ; with a [grin|bow|giggle]
far_away = the moon ; a passing/adj cloud ; a pirate ship ; the back/noun of a cart ; another world ; the end
  of a rainbow
at_dusk = at dusk ; at sunset ; just before supper ; as/conj the sun went down ; when the shadows grew long ;
  at teatime ; a hour later ; {number} hours later
searching = walking up and down ; looking very worried ; looking under every leaf ; sniffing sadly ; calling
  softly ; turning over every stone ; muttering about bad luck
tiny = tiny ; small ; polite ; shy ; grateful
the_covers = the [blankets|covers|sheets]
a_light = a small candle ; the lantern ; the [oil|brass|night] lamp
sleepily = sleepily ; with a [yawn|sigh|smile]
blundered = bumped the shelf ; tripped over the [mat|cat|chair] ; turned around too fast ; slipped on a wet
  tile ; reached a little too far ; sneezed a huge sneeze ; leaned on the [cupboard|curtain]
"""

# The usual part of speech of every word; plans mark any other use. The last three depend on the next word:
# "to" is part before a verb, "as" is adv before adj or adv, a particle is prep before what it governs.
WORDS = """
noun = acorn acorns afternoon air almond almonds ankle ankles ant ants apple apples arm attic autumn backyard
  badger bag baker bakery ball barn barrel barrels basket bath bats beach bean beans bear beaver bed bedside
  bedtime bee bees beetle beetles bell bells bench berries bicycle birch bird birdhouse birds birthday biscuit
  biscuits bit blackberry blackbird blade blanket blankets bluebell bluebells boards boat boats body book boot
  boots bottle bottom boulder bow bowl box boxes boy braids bramble brambles branch branches brass bray bread
  breakfast breath brick bricks bridge brook broom bucket bumblebee bump buns bush butter butterflies
  butterfly buttons cabbage cabbages cabin cake calf candle candlelight cans care carrot carrots cart
  cartwheel cartwheels castle castles cat cave cellar chair chalk cheeks cheese cherries cherry chestnut chick
  chimney chin church cinnamon circle clang clay clearing clock cloth cloud clouds coal coat cobweb cobwebs
  coin collar concert corner cottage cotton course covers cow crab crack crate crates creak cream cricket
  crickets crow crown crumb crust cry cup cupboard curtain curtains daisies daisy dancer dawn day days den dew
  disaster ditch doll donkey door doorstep dormouse dough dragon dragons drip drizzle drops drum duckling dusk
  dust ears echoes edge egg elephants end evening eye eyes face faces fair fairy farmyard feather feathers
  fence ferns festival fiddle field finish fireflies firefly fishing flag flags flakes flapping floor flop
  flour flower flowers flute fog folk foot forest fork fort fountain fox foxes friend friends frog front frown
  fun game games gap garden gardener garlic gate ghost ghosts giant giggle ginger girl glass glove glue goat
  goblin goose grass grin ground grunt guessing hailstones hailstorm hair half hammer hammers hand handful
  handkerchief handkerchiefs handle hands harbor harvest hat hats hay haystack head heap heart hedge hedgehog
  heels helping hen henhouse hens hill hills hillside holes holidays honey hoop hoot hooves horns horse horses
  hour hours house huff hurry hut ink iron island ivy jam jar jig jokes joy jug kettle key keys kindness king
  kings kite kites kitten knees knot knots ladder ladybug lake lamb lamp lamppost lamps lane lantern lanterns
  latch laundry lavender leaf leak leather leaves leg legs lemon letters librarian light lightning line lines
  lips lisp lizard loaf log logs lot luck lullaby lump lunch magic mail mailbox mane map maps marble marbles
  market mask mat meadow melon mess middle miles milk mill miller mind mint minutes mitten moan mole moon
  moons morning mornings moss moth mouse mouthful mud mushroom mushrooms nail nails name names nap naps neck
  neighborhood neighbors nest net nettles night nightcap nod noon nose notebook nuts oak oil onion onions
  orchard others otter owl owls owner paint paintbox pajamas pan pancakes pantry paper parade park part party
  patch path paths patience paws pear pears pebble pebbles peg penguin pepper petal petals picnic picture pie
  piece pieces pigeon pigeons piglet pillow pine pinecones pinwheel pirate pirates place plank planks plate
  plates playground plop plum plums pocket pole poles polka pond pony porridge post pot potato potatoes
  prickles pudding puddle puddles pump pumpkin pumpkins puppet puppy queens question questions rabbit raccoon
  rag rain rainbow raisin raisins reading reeds rhubarb ribbon ribbons rice riddles river rivers robin robot
  rock rocks roof roofs roots rope ropes rose roses row rubber sack sailboat sailor sails salt sand sandwich
  sandwiches scarecrow scarf school schoolyard scissors score scrape sea seat secret seeds shade shadow
  shadows shawl shed sheet sheets shelf shell shells shelves shepherd ship shirt shoe shoes shop show shower
  side sigh sight sign silk skates skeleton sky slap sled slice slippers smile smoke snail sneeze sniff snort
  snow snowstorm sob sock socks somersault song songs soup sparrow sparrows spectacles spider spiders splash
  spoon spoons spout spring square squeak squirrel stable stage stairs stall star stars start station statue
  steam step stepping steps stew stick stilts stitch stone stones stories stork storm story stove stranger
  straw strawberry stream string strings stumble stump sugar summer sums sun sunflower sunflowers sunrise
  sunset sunshine supper swan swans table tail tart tea teacher teacup teapot teapots tear tears teatime teeth
  telescope tent thanks thimble things thistles thorns thread threads throat thud thump thunder tile time
  times tin toe toes tongue tooth top tortoise towel tower town toy toys track train tray treasures tree
  treehouse trees troll trotters trumpet truth tummy tune tunes tunnel turn turnip turnips turns turtle
  umbrella umbrellas valley vanilla vase vegetable velvet village voice vole wagon walks wall walls walnut
  walnuts water waterfall wax way web wedding week weeks whales wheel wheelbarrow wheels whiskers willow wind
  windmill window windows windowsill wings wink winter wire wolf wolves wood woodpile wool word words world
  worm worms wren yawn year years
verb = added am answered are ask asked ate bake baked baking balance be beamed beat became began begin bend
  bent blew blinked blinking blow blown bounced bounded bowed breathed bring broke broken brought brushed
  build building bumped call called calling calmed came can cannot carried carved caught chase chased chat
  cheer cheered chuckled clap clapped close closed come comes cook could count counted counting counts cover
  covered cracked crackled crawled crept cried croaked cross dance danced dancing decided did dig disappeared
  discovered do dreamed drew dried drifted drink drive dropped drove drummed drumming dug dusting eat
  exclaimed fall fallen falling feeding fell felt fill filled find finished flapped flashed flew flicked fly
  flying fold folded folding follow forget forgotten found frowned galloped gathered gave gazed get gets
  giggled give given glanced glared glittered go gone grabbed grew grinned groaned grumbled grumbling guarded
  had hammered handed hang hanging happened has have hear heard held help helps hid hidden hide hiding hold
  holding hop hoped hopped howling hugged hugging hum hummed humming hung hurried hurt is juggle juggled
  juggling jump jumped jumping keep kept kick kicked kicking knew knit knitted knitting know knows laid landed
  laugh laughed lay leading leaked leaned leaped learn learned led left lent let licked lifted liked lined
  listen listened lit lived longed look looked looking lost loved loves lumbered lying made make making march
  marched marching may melted mended mending met missed move moved mumbled murmured must muttered muttering
  named napping need nodded noticed opened padded painted painting pass passing peek peeped peered pick picked
  picking planned play played playing plodded poked polished polishing pour poured practice practiced prepared
  press pretend promised pulled purred push pushed pushing put quacked raced ran rang rattled rattling reached
  read recalled remember remembered replied rest ride riding ring rocked rode roll rolled rub rubbed ruined
  rumbled rushed said sail sailed sang sat saved saw sawed say scampered scratched screeched scrubbing
  scurried see seemed seen set setting settled shake share shared shining shiver shivered shone shook shouted
  shuffled shut sighed sing singing sinking sitting skate skipped slapped sleep slept slid slide slipped smell
  smelled smells smiled smiling sneezed sniffed sniffing snored snoring soaked spare sparkled spell spin
  spoiled squashed squeaked stamping standing stared staring started stay stayed stepped sticking stood stop
  stopped stopping stranded stretched stuck sunk surprise sweeping swim swing swished swung take talk talked
  tap tapped tasted tastes taught tell tells thank think thinking thought threw thumped thumping ticked
  tidying tie tied tilted tipped told took torn tossed touched trapped tremble tried tripped trotted trust
  tucked tugged tumbled turned turning twirl twirled twisted untied vanished visit waddled wagged wait waited
  waiting walk walked walking want wanted warmed warms was washed washing watch watched watering wear went
  were whisper whispered whispering whistle whistled whistling wiggled will winked wiping wished wobble
  wobbled won wore worked works would wrote
adj = afraid asleep bad barefoot bearded beautiful best better big bigger biggest black blue booming brave
  bright broad brown bushy busy calm careful chattering chatty cheerful chilly clean clear clumsy cold coldest
  cool creaky crooked crowded curious curly damp dark deep dirty double dreadful dreamy drooping dry dull
  dusty early easy empty enormous faint fat favorite fierce fine flat floppy fluffy forgetful freckled fresh
  frightened frosty full funny gentle glad gloomy glowing golden good grassy grateful great greedy green grey
  grumpy happy heavy high hollow hot huge hungry ill jolly kind last late lazy leafy leaky little lonely long
  longest loose loud low mean merry messy missing misty mossy muddy musical narrow nearest neat nervous new
  next noisy old older oldest orange own patient peaceful perfect pink playful plump pointed polite poor
  prickly proud purple puzzled quick quicker quiet rainy ready red rocking rocky rosy round rusty sad safe
  sandy scared scratchy scruffy selfish shady shaggy shaky sharp shiny shivering short shy sick silent silky
  silly silver single sleepy slippery slow small smaller smooth snowy snug soft soggy sore sorry sound
  sparkling spotted springy squeaky starry steaming steep sticky stormy striped strong stronger stubborn sunny
  sure sweet tall taller tallest tangled thick thin thoughtful tidy tight tiny tired trembling twitchy unfair
  unkind unsure warm weary wet white whole wide wild winding windy wise wobbly wooden woolen woolly worn
  worried worth wrinkled wrong yellow young
adv = again ago ahead almost alone always away back backward barely carefully cheerfully clearly cleverly
  closely closer eagerly else enough even ever far fast first gently happily hard hardly home hopefully how
  hungrily instead just kindly later lower more most much nearer nearly never now nowhere often once only
  patiently perhaps proudly quickly quietly rather right sadly safely sleepily slowly softly somewhere soon
  still straight then there tightly today together too twice very warmly well where why
pron = anyone anything everybody everyone everything I it its itself me mine my nobody nothing our some
  something them us we what who whose you your
det = a all another any both each every no such the this
prep = after among at before beside between for from into like of than upon with without
conj = and because but if or so that until when whenever while
num = eight eleven five four hundred million nine one seven six ten thousand three twelve two
propn = April Aunt Captain Cherry Farmer Friday Grandma Grandpa Granny June Lane May Monday October Professor
  Saturday Sunday Sundays Thursday Tuesday Uncle Wednesday
intj = dear hooray oh please
part = not
to = to
as = as
particle = about above across along around behind by down in inside near off on out over past through under up
"""
