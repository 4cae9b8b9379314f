-- Schema of a run, format 1. docs/store.md explains every column and how to recompute a certificate from them.
CREATE TABLE run (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE clients (
    client      INTEGER PRIMARY KEY,
    name        TEXT    NOT NULL UNIQUE,
    samples     INTEGER NOT NULL,
    local_steps INTEGER NOT NULL,
    expansion   REAL
) STRICT;

CREATE TABLE nodes (
    node             INTEGER PRIMARY KEY,
    parent           INTEGER,
    kind             TEXT    NOT NULL CHECK (kind IN ('initial', 'round', 'noise', 'group', 'merge')),
    branch           INTEGER NOT NULL,
    position         INTEGER NOT NULL,
    samples          INTEGER NOT NULL,
    request_order    INTEGER NOT NULL,
    factor_sum       REAL    NOT NULL,
    factor_max       REAL    NOT NULL,
    mean_shift       REAL    NOT NULL,
    rounding         REAL    NOT NULL,
    noise_std        REAL    NOT NULL,
    distance         REAL    NOT NULL
) STRICT;

-- Clustered by client: a plan reads only the rounds of its clients.
CREATE TABLE participation (
    node    INTEGER NOT NULL,
    client  INTEGER NOT NULL,
    samples INTEGER NOT NULL,
    drift   REAL    NOT NULL,
    PRIMARY KEY (client, node)
) STRICT, WITHOUT ROWID;

-- The weight of each participant in its round, w_i = |D_i| / sum_j |D_j|.
CREATE VIEW weights AS
    SELECT p.node, p.client, p.samples, CAST(p.samples AS REAL) / n.samples AS weight, p.drift
    FROM participation p JOIN nodes n USING (node);

-- Models of groups that train separately; members and samples cover all rounds of the group so far.
CREATE TABLE group_models (
    node    INTEGER PRIMARY KEY,
    grp     INTEGER NOT NULL,
    rounds  INTEGER NOT NULL,
    samples INTEGER NOT NULL,
    members TEXT    NOT NULL
) STRICT;

-- Group models from which a merged model was made.
CREATE TABLE merges (
    node        INTEGER NOT NULL,
    grp         INTEGER NOT NULL,
    source_node INTEGER NOT NULL,
    samples     INTEGER NOT NULL,
    PRIMARY KEY (node, grp)
) STRICT, WITHOUT ROWID;

CREATE TABLE evaluations (
    node     INTEGER NOT NULL,
    subset   TEXT    NOT NULL,
    samples  INTEGER NOT NULL,
    accuracy REAL    NOT NULL,
    loss     REAL    NOT NULL,
    PRIMARY KEY (node, subset)
) STRICT, WITHOUT ROWID;

CREATE TABLE models (
    node    INTEGER PRIMARY KEY,
    kept    INTEGER NOT NULL,
    bytes   INTEGER NOT NULL,
    digest  TEXT    NOT NULL,
    nonce   TEXT    NOT NULL,
    psi_max REAL    NOT NULL
) STRICT;

-- Statistics of closed-form heads: files per client, and the sum from which the head is solved. clients is a
-- JSON list.
CREATE TABLE statistics (
    file    TEXT PRIMARY KEY,
    node    INTEGER NOT NULL,
    clients TEXT    NOT NULL,
    samples INTEGER NOT NULL,
    bytes   INTEGER NOT NULL,
    digest  TEXT    NOT NULL
) STRICT, WITHOUT ROWID;

-- Rejected replies of clients, by the position of their round; left_out: the round took place without the client.
CREATE TABLE rejections (
    branch   INTEGER NOT NULL,
    round    INTEGER NOT NULL,
    number   INTEGER NOT NULL,
    client   TEXT    NOT NULL,
    reason   TEXT    NOT NULL,
    left_out INTEGER NOT NULL,
    PRIMARY KEY (branch, round, number)
) STRICT, WITHOUT ROWID;

-- terms is JSON; method is the requested one until the request is executed, then the one that was used.
CREATE TABLE requests (
    request       TEXT PRIMARY KEY,
    status        TEXT NOT NULL CHECK (
        status IN ('received', 'verified', 'planned', 'running', 'done', 'refused', 'withdrawn')
    ),
    terms         TEXT NOT NULL,
    method        TEXT NOT NULL,
    deadline_days INTEGER NOT NULL,
    received      TEXT NOT NULL,
    request_order INTEGER,
    carried_out   TEXT,
    multiplier    REAL,
    noise_std     REAL,
    source_node   INTEGER,
    wanted_node   INTEGER,
    noise_node    INTEGER,
    final_node    INTEGER,
    level         TEXT,
    finished      TEXT
) STRICT, WITHOUT ROWID;

CREATE TABLE subjects (
    subject INTEGER PRIMARY KEY,
    request TEXT NOT NULL,
    clients TEXT NOT NULL
) STRICT;

CREATE TABLE charges (
    noise_node INTEGER NOT NULL,
    subject    INTEGER NOT NULL,
    psi        TEXT    NOT NULL,
    charge     REAL    NOT NULL,
    PRIMARY KEY (noise_node, subject)
) STRICT, WITHOUT ROWID;

CREATE TABLE certificates (
    request TEXT NOT NULL,
    form    TEXT NOT NULL CHECK (form IN ('auditor', 'public')),
    content TEXT NOT NULL,
    PRIMARY KEY (request, form)
) STRICT, WITHOUT ROWID;

CREATE TABLE events (
    seq        INTEGER PRIMARY KEY,
    time       TEXT NOT NULL,
    kind       TEXT NOT NULL,
    payload    TEXT NOT NULL,
    nonce      BLOB NOT NULL,
    commitment BLOB NOT NULL,
    hash       BLOB NOT NULL,
    signature  BLOB
) STRICT;
