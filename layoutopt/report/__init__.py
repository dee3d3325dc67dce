"""``layoutopt report``: one HTML file that explains a plan, without anything from a network.

``gather`` collects the facts, a module per section says what is shown of them, ``charts`` draws, ``page`` writes HTML.
"""
