"""Who and what the tales of the grammar are about: kinds of heroes, things, describing words and
names. Owns the word lists of `grammar` and what fits to each kind: pronouns, homes, food, way of
going. All of it was written for this project. It knows nothing of plots or of requests.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pronouns:
    he: str
    him: str
    his: str
    himself: str


HE = Pronouns("he", "him", "his", "himself")
SHE = Pronouns("she", "her", "her", "herself")
IT = Pronouns("it", "it", "its", "itself")


@dataclass(frozen=True, slots=True)
class Habitat:
    """What heroes of one surrounding share: where they live ("in ..."), what they eat."""

    homes: tuple[str, ...]
    foods: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of hero. `group` decides the plots; a unique kind ("the moon") never gets "a"."""

    noun: str
    group: str
    habitat: str
    pronouns: tuple[Pronouns, ...]

    @property
    def is_unique(self) -> bool:
        return self.noun in UNIQUE


def word_list(text: str) -> tuple[str, ...]:
    """The phrases of a text that are divided by commas."""
    return tuple(word.strip() for word in text.replace("\n", " ").split(",") if word.strip())


def _habitat(homes: str, foods: str) -> Habitat:
    return Habitat(word_list(homes), word_list(foods))


HABITATS = {
    "forest": _habitat(
        """at the edge of the forest, in a quiet forest, under an old oak tree, in a green wood, near a forest stream, in a
        den under a hill, deep in the woods, between the tall pine trees""",
        "berries, nuts, apples, mushrooms, sweet roots, honey",
    ),
    "farm": _habitat(
        "on a farm, on a small farm by the river, in a red barn, on a farm near the hills, "
        "beside a big meadow",
        "fresh hay, corn, apples, carrots, warm milk, oats, turnips",
    ),
    "jungle": _habitat(
        "in a hot jungle, near a wide river, on the great plain, in the shade of a big tree, "
        "far away in Africa",
        "bananas, ripe mangoes, sweet leaves, juicy melons, figs",
    ),
    "desert": _habitat(
        "in the hot desert, beside a small oasis, among the dry hills", "dates, dry grass, figs"
    ),
    "ice": _habitat(
        "in the land of ice and snow, on a cold white shore, near the North Pole, on a great "
        "block of ice",
        "fresh fish, cold berries, warm soup",
    ),
    "garden": _habitat(
        "in a sunny garden, under a flower pot, in the tall grass, behind the garden wall, "
        "beside a little pond",
        "green leaves, sweet nectar, bread crumbs, ripe strawberries, grass seeds",
    ),
    "house": _habitat(
        "in a hole in the wall, under the kitchen floor, in a cosy house, in an old mill, "
        "behind the stove",
        "cheese, bread crumbs, cake, corn, warm milk",
    ),
    "sea": _habitat(
        "in the deep blue sea, near a coral reef, in a quiet bay, at the bottom of the sea, "
        "in a cave under the waves",
        "sea grass, small shrimps, green seaweed",
    ),
    "tree": _habitat(
        "in a nest in a tall tree, on a high branch, in an old tower, at the top of a pine "
        "tree, on the roof of a barn",
        "seeds, berries, crumbs, corn, cherries",
    ),
    "castle": _habitat(
        "in a great castle, in a stone castle on a hill, in a palace with a hundred rooms, "
        "in a castle by the sea",
        "roast meat and bread, plum cake, apple pie, honey cakes",
    ),
    "village": _habitat(
        """in a small village, in a little house by the road, at the end of the village, in a house on a hill, near a mill,
        in a cottage by the river""",
        "bread and cheese, hot soup, apple pie, porridge, plums, pancakes",
    ),
    "town": _habitat(
        "in a big city, in a busy town, in a tall house with a red door, near the harbour, "
        "on a noisy street",
        "hot soup, sandwiches, pancakes, apple cake, warm bread",
    ),
    "magic": _habitat(
        """in a dark forest, on top of a high mountain, in a cave behind a waterfall, in a crooked tower,
            in a valley that nobody knew, at the end of the world""",
        "mushroom soup, honey cakes, blueberry pie, roasted apples",
    ),
    "ship": _habitat(
        "on a ship, on a little island, near the harbour, beside the sea",
        "fish soup, dry bread, oranges",
    ),
    "sky": _habitat(
        "high above the hills, up in the sky, far above the sea, over the roofs of a village", "dew"
    ),
    "room": _habitat(
        "on a shelf in the kitchen, in an old shop, in a child's room, in a house by the "
        "river, in the window of a shop",
        "oil",
    ),
    "field": _habitat(
        "in a green field, beside a garden wall, on a sunny hill, at the edge of a wood", "rain"
    ),
    "road": _habitat(
        "in a small town, near the harbour, at the end of a long street, behind the mill", "oil"
    ),
    "land": _habitat(
        "far away in the north, behind the blue hills, at the end of a long road, in a quiet land",
        "rain",
    ),
}

_ANY = (HE, SHE)
_TABLE: tuple[tuple[str, str, tuple[Pronouns, ...], str], ...] = (
    (
        "animal",
        "forest",
        _ANY,
        """fox, wolf, bear, deer, hedgehog, squirrel, badger, rabbit, hare, mole, beaver, raccoon, skunk, tortoise, bat,
        lynx, otter, weasel, moose, chipmunk, bear cub, fox cub, snake, lizard, porcupine, ferret, wolf cub, newt, stag""",
    ),
    (
        "animal",
        "farm",
        _ANY,
        (
            "dog, cat, horse, pig, sheep, goat, donkey, lamb, calf, pony, puppy, kitten, piglet, "
            "sheepdog"
        ),
    ),
    ("animal", "farm", (SHE,), "cow, mare"),
    ("animal", "farm", (HE,), "ox, bull, ram"),
    (
        "animal",
        "jungle",
        _ANY,
        """tiger, elephant, monkey, giraffe, zebra, hippo, rhino, crocodile, leopard, gorilla, panther, cheetah, chameleon,
        kangaroo, koala, panda, dinosaur, baby elephant, hyena, sloth, antelope, buffalo, llama, meerkat, lemur,
        armadillo, anteater, jaguar, gecko, iguana, chimpanzee, orangutan""",
    ),
    ("animal", "jungle", (HE,), "lion"),
    ("animal", "jungle", (SHE,), "lioness"),
    ("animal", "desert", _ANY, "camel, desert mouse"),
    ("animal", "ice", _ANY, "polar bear, reindeer, walrus, seal, penguin, husky"),
    (
        "animal",
        "garden",
        _ANY,
        """snail, ant, spider, caterpillar, worm, beetle, grasshopper, cricket, toad, frog, ladybird, tadpole, slug""",
    ),
    ("animal", "house", _ANY, "mouse, rat, hamster, guinea pig"),
    ("animal", "magic", _ANY, "dragon, unicorn, griffin, werewolf, yeti, phoenix"),
    (
        "bird",
        "garden",
        _ANY,
        "bee, butterfly, firefly, dragonfly, moth, wasp, fly, mosquito, bumblebee",
    ),
    (
        "bird",
        "tree",
        _ANY,
        """owl, crow, eagle, sparrow, robin, swan, parrot, pigeon, raven, stork, seagull, swallow, nightingale, woodpecker,
        hawk, dove, bluebird, bird, magpie, blackbird, flamingo, pelican, hummingbird, toucan, vulture, canary, wren,
        falcon""",
    ),
    ("bird", "farm", _ANY, "duck, goose, duckling, chick, turkey, chicken"),
    ("bird", "farm", (SHE,), "hen"),
    ("bird", "farm", (HE,), "rooster, peacock"),
    (
        "water",
        "sea",
        _ANY,
        """fish, whale, dolphin, shark, octopus, crab, starfish, turtle, seahorse, goldfish, jellyfish, lobster, baby whale,
        squid, eel, salmon, shrimp, sea lion, manatee, snapper""",
    ),
    ("water", "sea", (SHE,), "mermaid"),
    ("person", "castle", (HE,), "king, prince, knight, jester, page boy, duke, emperor, guard"),
    ("person", "castle", (SHE,), "queen, princess, maid, duchess"),
    (
        "person",
        "village",
        (HE,),
        """boy, farmer, miller, baker, tailor, shoemaker, blacksmith, woodcutter, fisherman, shepherd, grandfather,
        carpenter, gardener, beggar, merchant, soldier, potter, old man, hunter, scarecrow, father, brother, uncle,
        cowboy, butcher, barber, monk""",
    ),
    (
        "person",
        "village",
        (SHE,),
        (
            "girl, grandmother, shepherdess, old woman, mother, sister, aunt, seamstress, "
            "weaver, milkmaid, goose girl"
        ),
    ),
    (
        "person",
        "village",
        _ANY,
        (
            "child, teacher, doctor, cook, painter, musician, thief, singer, poet, writer, "
            "neighbour, traveller, stranger"
        ),
    ),
    (
        "person",
        "town",
        _ANY,
        """robot, dancer, clown, inventor, explorer, detective, librarian, mayor, astronaut, driver, pilot, juggler,
        firefighter, superhero, ninja, student, scientist, chef, engineer, programmer, dentist, waiter, actor, spy,
        runner, footballer, alien, photographer, plumber, judge, reporter""",
    ),
    ("person", "town", (HE,), "policeman, postman"),
    ("person", "town", (SHE,), "nurse"),
    (
        "person",
        "magic",
        (HE,),
        "wizard, giant, troll, ogre, magician, dwarf, leprechaun, sorcerer, genie",
    ),
    ("person", "magic", (SHE,), "witch, fairy"),
    (
        "person",
        "magic",
        _ANY,
        "elf, goblin, ghost, monster, gnome, vampire, zombie, mummy, skeleton, sprite",
    ),
    ("person", "ice", (HE,), "snowman"),
    ("person", "ship", _ANY, "pirate, sailor, captain, viking"),
    ("sky", "sky", (SHE,), "moon"),
    ("sky", "sky", (HE,), "sun, wind, north wind, thunder"),
    ("sky", "sky", _ANY, "star, cloud, snowflake, raindrop"),
    ("sky", "sky", (IT,), "rainbow, rain, snow, storm, night, winter, spring, comet"),
    (
        "thing",
        "room",
        (IT,),
        """teapot, lantern, candle, clock, kettle, broom, drum, toy, ball, book, pencil, umbrella, shoe, hat, pillow, bell,
        spoon, cup, chair, mirror, key, coin, button, toaster, lamp, teddy bear, doll, sock, violin, piano, guitar,
        bucket, basket, blanket, computer, telephone, scarf, mitten, cookie, cake, pancake, sandwich, box, table, bed,
        carpet, jar, paintbrush, needle, plate, top, music box, pizza, doughnut, egg, cheese, loaf, radio, camera,
        brick, rug, door, window, stove, fork, crayon, puppet, ring, crown, trumpet, flute, vase, ladder, hammer,
        muffin, glove""",
    ),
    (
        "thing",
        "field",
        (IT,),
        """tree, oak tree, apple tree, flower, rose, sunflower, seed, leaf, stone, pebble, pumpkin, apple, potato, carrot,
        mushroom, daisy, acorn, pear, cherry tree, turnip, cabbage, tulip, fir tree, tomato, banana, strawberry, onion,
        lemon, cactus, cherry, orange, pea, bean, cucumber, nut, snowdrop, lily, dandelion, log""",
    ),
    (
        "thing",
        "road",
        (IT,),
        """train, car, bus, truck, boat, kite, balloon, bicycle, airplane, rocket, tractor, ship, cart, lighthouse, street
        lamp, sled, wagon, tram, paper boat, windmill, helicopter, submarine, spaceship, fire engine, motorcycle, tent,
        anchor, sailing boat, taxi, ferry, digger, steam engine, skateboard""",
    ),
    (
        "place",
        "land",
        (IT,),
        """mountain, river, lake, forest, island, castle, house, garden, village, tower, bridge, well, hill, cave, volcano,
        school, mill, farm, city, desert, town, valley, stream, pond, beach, meadow, waterfall, swamp, harbour, library,
        market, shop, zoo, palace, kingdom, cottage, jungle""",
    ),
    ("place", "land", (SHE,), "sea"),
)

UNIQUE = frozenset(
    word_list(
        "moon, sun, wind, north wind, thunder, rain, snow, night, winter, spring, sea, "
        "rainbow, storm"
    )
)
KINDS = tuple(
    Kind(noun, group, habitat, pronouns)
    for group, habitat, pronouns, nouns in _TABLE
    for noun in word_list(nouns)
)
FAVOURITES = word_list(
    """fox, knight, girl, boy, king, queen, dragon, princess, prince, rabbit, mouse, cat, dog, bear, owl, wolf, lion,
        frog, moon, sun, star, wind, robot, witch, wizard, pirate, fairy, giant, unicorn, elephant, bird, fish, farmer,
        monkey, turtle, duck, horse, penguin, mermaid, snowman, hedgehog, squirrel, ghost, monster, dinosaur"""
)
HELPERS = word_list(
    """owl, crow, mouse, squirrel, hedgehog, frog, tortoise, sparrow, goat, ant, rabbit, deer, mole, beaver, snail,
        duck, bee, robin, cat, horse, donkey"""
)
WATER_HELPERS = word_list("turtle, crab, whale, dolphin, octopus, starfish, seahorse")
HELPER_ADJECTIVES = word_list("old, wise, kind, tiny, little, friendly, gentle, grey, small, young")

THINGS = word_list(
    """hat, scarf, key, ball, ring, coin, book, bell, drum, kite, lantern, basket, button, blanket, boot, crown, flute,
        mirror, map, spoon, umbrella, feather, shell, box, cup, whistle, balloon, necklace, glove, doll, toy boat, teddy
        bear, ribbon, stick, pocket watch, violin, shoe, mitten, marble, candle, pebble, bag, bracelet, sword, pen, jar,
        bicycle, paintbrush, apron, comb, watch, telescope, letter, pencil, notebook, trumpet, belt, cap, coat, rope,
        hammer, kettle, compass, puzzle, skate, sled, toothbrush, pillow, ladder, wallet, camera, phone, lamp, wand,
        purse, pearl, diamond, stone, backpack, ticket, statue, carpet, vase, treasure chest, music box, guitar, piano,
        trophy, potion"""
)
THING_ADJECTIVES = word_list(
    "red, blue, golden, little, old, shiny, silver, green, yellow, new, beautiful, small, favourite"
)

NAMES_HE = word_list(
    """Tom, Ben, Max, Leo, Oscar, Finn, Jack, Peter, Hugo, Sam, Rufus, Otto, Theo, Felix, Bruno, Will, Toby, Henry,
        Noah, Pip, Oliver, Charlie, George, Martin, Paul, Arthur, Simon, Jacob, Kofi, Ravi"""
)
NAMES_SHE = word_list(
    """Lily, Anna, Rosa, Emma, Mia, Clara, Ella, Nina, Lucy, Ruby, Molly, Daisy, Ida, Alice, Sophie, Grace, Hazel,
        Nora, Polly, Eva, Mary, Maya, Zoe, Tilly, Elsa, Martha, Amina, Priya, Bella, Julia"""
)

ADJECTIVE_TRAITS: dict[str, tuple[str, ...]] = {
    "brave": (
        "{he} was not afraid of the dark, or of storms, or of anything at all.",
        "nobody had ever seen {him} run away.",
    ),
    "little": (
        "{he} was so little that people often forgot {him}.",
        "{he} was small, but {he} had big dreams.",
    ),
    "clever": (
        "{he} always had a good idea.",
        "when others were at a loss, {he} sat down and thought.",
    ),
    "kind": (
        "{he} had a good word for everyone.",
        "{he} could not see anyone cry without helping.",
    ),
    "lazy": (
        "{he} liked to sleep until noon, and then {he} liked to rest.",
        "work was the one thing {he} did not like.",
    ),
    "greedy": (
        "however much {he} had, {he} always wanted more.",
        "{he} never shared so much as a crumb.",
    ),
    "lonely": ("nobody ever came to see {him}.", "all day long {he} wished for a friend."),
    "happy": (
        "{he} sang from morning until night.",
        "{he} laughed so much that everybody near {him} had to laugh too.",
    ),
    "sad": ("{he} had not laughed for a very long time.", "nobody knew why {he} sighed so much."),
    "old": (
        "{he} had seen many summers and many winters.",
        "{he} was slow now, but {he} knew a great deal.",
    ),
    "young": ("{he} had a great deal to learn.", "everything in the world was new to {him}."),
    "hungry": ("{he} could think of nothing but {food}.", "{his} stomach was always empty."),
    "silly": (
        "{he} did everything the wrong way round.",
        "{he} once tried to carry water in a basket.",
    ),
    "proud": (
        "{he} thought that nobody was as fine as {he} was.",
        "{he} held {his} head very high.",
    ),
    "poor": ("{he} had nothing but a warm heart.", "some days {he} had nothing to eat at all."),
    "shy": (
        "{he} hid whenever a stranger came by.",
        "{he} spoke so softly that hardly anyone heard {him}.",
    ),
    "tiny": ("{he} could have slept in a teacup.", "{he} was the smallest one for miles around."),
    "big": (
        "{he} was so big that the ground shook when {he} came.",
        "everyone looked up when {he} came by.",
    ),
    "gentle": ("{he} never hurt even a fly.", "{his} voice was as soft as rain."),
    "curious": (
        "{he} asked questions all day long.",
        "{he} wanted to know what was behind every door.",
    ),
    "sleepy": (
        "{he} yawned in the morning, at noon and at night.",
        "{he} could fall asleep anywhere.",
    ),
    "wise": ("everyone came to {him} for advice.", "{he} thought a long time before {he} spoke."),
    "naughty": ("{he} played a trick on somebody every day.", "{he} never did what {he} was told."),
    "foolish": ("{he} believed everything that {he} heard.", "{he} never stopped to think."),
    "cunning": (
        "{he} knew a hundred tricks.",
        "people said that you should never trust {his} smile.",
    ),
    "friendly": (
        "{he} said hello to everyone {he} met.",
        "{he} had more friends than there are days in the year.",
    ),
    "strong": (
        "{he} could pull a cart that two horses could not pull.",
        "nobody around was as strong as {he} was.",
    ),
    "grumpy": (
        "{he} never said good morning to anyone.",
        "{he} grumbled about the sun and {he} grumbled about the rain.",
    ),
    "quiet": ("{he} listened more than {he} spoke.", "you hardly ever heard {him} come or go."),
    "noisy": ("you could hear {him} three hills away.", "{he} could not be quiet for a minute."),
    "honest": ("{he} had never told a lie.", "{he} always gave back what was not {his} own."),
    "selfish": ("{he} thought only of {himself}.", "{he} never gave anything to anyone."),
    "cheerful": (
        "{he} smiled even when it rained.",
        "{he} whistled a merry tune wherever {he} was.",
    ),
    "angry": (
        "{he} shouted at everyone who came near.",
        "nobody knew why {he} was always so cross.",
    ),
    "lost": (
        "{he} did not know the way home.",
        "{he} had taken a wrong turn, and now everything looked strange.",
    ),
    "magic": (
        "strange and lovely things happened wherever {he} was.",
        "sparks flew when {he} laughed.",
    ),
    "white": ("{he} was as white as fresh snow.",),
    "black": ("{he} was as black as the night.",),
    "red": ("{he} was as red as a ripe apple.",),
    "blue": ("{he} was as blue as the summer sky.",),
    "golden": ("{he} shone like gold in the morning sun.",),
    "green": ("{he} was as green as the grass in May.",),
    "beautiful": ("everyone stopped to look when {he} came by.",),
    "famous": ("everyone for miles around had heard of {him}.",),
    "careless": ("{he} forgot things and dropped things and broke things.",),
    "patient": ("{he} knew how to wait.",),
    "busy": ("{he} never sat still.",),
    "forgetful": ("{he} could never remember what day it was.",),
    "clumsy": ("{he} bumped into everything.",),
    "rich": ("{he} had three chests full of gold.",),
    "playful": ("{he} could make a game out of anything.",),
    "polite": ("{he} never forgot to say please and thank you.",),
    "timid": ("even {his} own shadow made {him} jump.",),
    "wild": ("{he} ran where {he} liked and did what {he} liked.",),
    "bored": ("{he} could not think of anything to do.",),
    "dreamy": ("{he} spent whole days looking at the clouds.",),
}
THING_TRAITS = word_list(
    "little, old, sad, lonely, happy, brave, tiny, big, magic, golden, red, blue, proud, "
    "beautiful, kind, shy, curious"
)

GOING = {  # (past, bare, -ing) by group
    "bird": (("flew", "fly", "flying"), ("flew", "fly", "flying")),
    "water": (("swam", "swim", "swimming"), ("swam", "swim", "swimming")),
    "animal": (
        ("ran", "run", "running"),
        ("walked", "walk", "walking"),
        ("trotted", "trot", "trotting"),
    ),
    "person": (
        ("walked", "walk", "walking"),
        ("went", "go", "going"),
        ("hurried", "hurry", "hurrying"),
    ),
    "sky": (("drifted", "drift", "drifting"), ("travelled", "travel", "travelling")),
    "thing": (("went", "go", "going"), ("travelled", "travel", "travelling")),
    "place": (("went", "go", "going"), ("went", "go", "going")),
}
SLOW = frozenset(word_list("snail, worm, caterpillar, slug, snake, tortoise"))
SLOW_GOING = (("crept", "creep", "creeping"), ("crawled", "crawl", "crawling"))

_TENSES = """did not/does not, could not/cannot, could/can, was/is, had/has, lost/loses, wanted/wants, learned/learns,
        loved/loves, found/finds, saved/saves, helped/helps, met/meets, looked/looks, went/goes, won/wins, ran/runs,
        lived/lives, told/tells, cried/cries, played/plays, thought/thinks, slept/sleeps, dreamed/dreams, solved/solves,
        planted/plants, baked/bakes, fought/fights, talked/talks, made/makes, got/gets, danced/dances, taught/teaches,
        built/builds, became/become, flew/flies, tried/tries, heard/hears, never/never, saw/sees, caught/catches,
        swam/swims, travelled/travels, waited/waits, tricked/tricks, quarrelled/quarrel, worked/work, sang/sings"""
PRESENT = dict(pair.split("/") for pair in word_list(_TENSES))
"""The present tense of the verbs that requests use in the past tense."""

STRANGE_HEROES = (
    "pineapple", "trombone", "hippopotamus", "stapler", "cowbell", "locomotive", "gladiator",
    "rattlesnake", "drainpipe", "suitcase", "accordion", "lawnmower", "mailman", "newspaper",
    "typewriter", "swordfish", "cupboard", "milkshake", "grandson", "thunderbolt",
)  # fmt: skip
"""Heroes that no tale of the grammar has, to see whether the model can speak of
what it was not prepared for."""
