"""A few pages of plain text on which a model's activations are measured when it is converted.

Owns the text: prose, dialogue, code, figures, tables and names, so that many directions of the activations are met.
It is part of what a conversion depends on, so a change of it is a change of the converted model.
"""

from __future__ import annotations

__all__ = ["PASSAGES"]

PASSAGES = (
    """The old bridge at Hallin had stood for a hundred and sixty years when the council decided to replace it. It was
    made of grey stone, in four low arches, and every spring the river rose to within a hand's breadth of the road.
    Farmers on the eastern bank remembered two floods in which the middle arches were blocked by trees, and the water
    went around the village instead of under the bridge. In 1987 an engineer named Clara Venn was asked to look at the
    foundations. She wrote that the second pier had sunk by eleven centimetres on its upstream side, that the mortar
    could be removed with a spoon, and that nobody should drive a lorry across it again. The council thanked her, put
    up a sign, and did nothing for nine years.
""",
    """Plants take in carbon dioxide through small openings in their leaves and water through their roots. With the
    energy of sunlight, which chlorophyll absorbs mostly in the red and the blue part of the spectrum, they turn both
    into sugar and release oxygen. The process has two stages. In the first, light splits water and charges small
    carrier molecules; in the second, these carriers drive a cycle of reactions that fixes carbon. The second stage
    does not need light directly, but it stops soon after dark because the carriers run out. At high temperatures the
    enzyme of the second stage takes up oxygen instead of carbon dioxide more often, which wastes energy; maize and
    sugar cane avoid this by concentrating the gas first.
""",
    """"Did you lock the door?" asked Martin.
"I thought you did," said Ana. "You were the last to leave."
"No, I went back for the umbrella, and then I heard you calling from the car."
She looked at him for a moment. "I did not call you. I was in the car with the radio on."
"Then who was it?"
Neither of them spoke until they reached the crossing. The light was red, and a woman with two dogs walked slowly in
front of them. "We should turn around," Ana said at last. "It is ten minutes. We will still be there before the
speeches." Martin nodded, but he did not move his hands from the wheel. "If we go back," he said, "and the door is
open, what then?"
""",
    '''def moving_average(values: list[float], window: int) -> list[float]:
    """Return the mean of every `window` consecutive values."""
    if window < 1:
        raise ValueError("window must be at least 1")
    total = 0.0
    means = []
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
        if index >= window - 1:
            means.append(total / window)
    return means


class Stack:
    def __init__(self) -> None:
        self.items = []

    def push(self, item) -> None:
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()
''',
    """City | Country | River | Population
--- | --- | --- | ---
Vienna | Austria | Danube | 1,980,000
Cairo | Egypt | Nile | 10,200,000
Portland | United States | Willamette | 635,000
Hanoi | Vietnam | Red River | 5,300,000
Seville | Spain | Guadalquivir | 684,000

The table lists five cities. Two of them have fewer than one million inhabitants: Portland and Seville. The largest is
Cairo, with more than ten million. All five lie on a river, and three of these rivers flow into the sea within the
same country.
""",
    """The 1962 season was the club's best for three decades. Under their new manager, Walter Priddle, they lost only
    four of thirty-eight league matches and finished second, two points behind the champions. Priddle, who had played
    for the club as a young man before an injury to his knee ended his career, sold two forwards in the summer and
    brought in Joseph Adeyemi, a centre half from Lagos. Adeyemi went on to play 311 matches for the club and was its
    captain from 1965 to 1971. He later managed the youth team, and a stand of the stadium has carried his name since
    2004. The record attendance, 41,208, was set on 3 March 1962 in the sixth round of the cup, when the visitors won
    by two goals to one after extra time.
""",
    """To make the bread, mix 500 g of flour with 350 g of water and leave the dough to rest for half an hour. Add 100
    g of starter and 10 g of salt. Fold the dough four times, once every thirty minutes: wet your hands, take one
    side, pull it up until it resists, and lay it over the other side. Then let it stand until it has grown by half.
    Shape it, put it in a basket and keep it in the refrigerator overnight. The next morning heat the oven to 250
    degrees with an iron pot in it. Bake the bread in the closed pot for twenty minutes and without the lid for
    another twenty-five. Let it cool before you cut it.
""",
    """Question: A train leaves Arden at 9:40 and travels 126 kilometres to Belford at an average speed of 84
    kilometres per hour. It waits there for 12 minutes and returns at 72 kilometres per hour. When is it back in Arden?
Answer: The way out takes 126 / 84 = 1.5 hours, so the train reaches Belford at 11:10. It leaves at 11:22. The way
back takes 126 / 72 = 1.75 hours, which is 1 hour and 45 minutes. The train is back in Arden at 13:07.

Question: What is 15 % of 260, and what is 260 less 15 %?
Answer: 15 % of 260 is 0.15 * 260 = 39. So 260 less 15 % is 260 - 39 = 221.
""",
    """{"company": "Northgate Tools", "founded": 1998, "departments": [{"name": "Sales", "head": "Rose Okafor",
    "staff": 14}, {"name": "Workshop", "head": "Tom Lindqvist", "staff": 37}], "address": {"street": "12 Mill Lane",
    "city": "Leeds"}}
$ find /var/log -name "*.log" -size +50M -mtime +30
/var/log/app/worker-2.log
/var/log/app/worker-7.log
$ du -sh /var/log/app && df -h /var
2.4G    /var/log/app
Filesystem      Size  Used Avail Use% Mounted on
/dev/sda2        40G   31G  7.1G  82% /var
2024-05-17 08:12:44 ERROR worker-7: connection to database "orders" refused (attempt 3 of 5), retrying in 20 s
""",
    """Dear Mr. Hale, thank you for your letter of 4 June. I am sorry that the chair arrived with a broken leg and
    that nobody answered your first two messages. We have sent a new chair today; it should reach you on Thursday. You
    do not have to return the old one. If you would rather have your money back, please tell us before Wednesday, and
    we will stop the delivery. With this letter you will find a voucher for your next order. I hope that you will give
    us another chance. Yours sincerely, Ruth Amsel, customer service.
""",
)
"""Texts of 100 to 250 tokens each."""
