"""How cula proves itself: random problems, poisoned memory, the tolerance table, the check grid and four properties.

`cula check` and the tests share these modules. Nothing here knows an implementation: what exists is read from
`cula.available()`, so a new row of the table is held to the same proof without a change.
"""
