"""The communicator: collectives over links that survive the exchange of a rank.

From below: `frame` and `link` move bytes, `handshake`, `listener` and `dial` open links, `mesh` and
`collectives` compute over them, `world` and `fabric` say which links belong to which epoch, `group`
is what torch and the user hold, and `intercept` puts it in their hands.
"""
