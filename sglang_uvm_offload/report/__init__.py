"""HTML reports that explain a server or a replay to a person: a headline, advice, charts."""
