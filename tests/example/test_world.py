"""The example world: names that can be searched for, and a split without a shared entity."""

from collections import Counter

from example.world import MIN_CITIES_PER_COUNTRY, Split, build_world, plain_words


def test_countries_are_split_about_three_to_one():
    """Neither half may be too small to ask about."""
    world = build_world()
    num_validation = len(world.countries_of(Split.VALIDATION))
    assert 20 <= num_validation <= len(world.countries) // 2


def test_a_city_is_in_the_half_of_its_country():
    """The split is by country: a bridge entity never crosses it."""
    world = build_world()
    for split in Split:
        names = {country.name for country in world.countries_of(split)}
        assert {city.country.name for city in world.cities_of(split)} == names


def test_names_are_unique_and_never_inside_one_another():
    """A query for one entity must not match another one's name."""
    world = build_world()
    cities = [city.name.lower() for city in world.cities]
    words = [word for country in world.countries for word in plain_words(country.name)]
    assert len(set(cities)) == len(cities)
    assert len(set(words)) == len(words)
    assert not [name for name in cities for word in words if name in word]


def test_every_country_has_cities_to_ask_about():
    """A country without cities could not be a bridge."""
    world = build_world()
    counts = Counter(city.country.name for city in world.cities)
    assert min(counts[country.name] for country in world.countries) >= MIN_CITIES_PER_COUNTRY


def test_facts_are_those_of_the_package():
    """Ghana's record, read by hand, guards the field names."""
    ghana = next(c for c in build_world().countries if c.name == "Ghana")
    assert (ghana.calling_code, ghana.iso_number, ghana.area) == ("233", "288", 239460)
    assert ghana.density == round(29767108 / 239460)


def test_another_seed_gives_another_split_of_the_same_countries():
    """The seed moves countries between the halves and changes nothing else."""
    first, second = build_world(0), build_world(1)
    assert [c.name for c in first.countries] == [c.name for c in second.countries]
    assert [c.split for c in first.countries] != [c.split for c in second.countries]
