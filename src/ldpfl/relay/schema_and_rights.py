"""Whether the tables of a store are what the relay would have made, and nobody else's to read or to change.

Whoever made the tables before the relay did could have put a trigger on them that keeps who sent what. Nothing here helps against a
superuser of the database server: see the threat model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from sqlalchemy import Column, Connection, Dialect, ForeignKeyConstraint, PrimaryKeyConstraint, Table, UniqueConstraint, create_engine, text
from sqlalchemy.dialects import postgresql

from ldpfl.relay.errors import UnfitStore
from ldpfl.relay.schema import SCHEMA, blocks, is_sqlite, metadata, parts, tokens, uploads

WITHOUT_SAMPLES = (tokens, uploads, blocks, parts)
"""Tables without planner statistics, because these would keep samples of deleted rows."""

INCOMPRESSIBLE = (blocks.c.data, parts.c.data)


def check_schema(connection: Connection, store_name: str) -> None:
    """Raise unless all tables are as this program makes them, and only this user may read or change them.

    Raises:
        UnfitStore: something differs; the message names the first difference.
    """
    faults = _sqlite_faults(connection) if is_sqlite(connection) else _postgres_faults(connection)
    for fault in faults:  # the first one only: the generator is not read further
        raise _unfit_store_error(store_name, fault)


def check_schema_place(connection: Connection, store_name: str) -> None:
    """Raise unless the relay's schema in a PostgreSQL database is safe to make tables in.

    Raises:
        UnfitStore: the schema is another role's, or code of others would run when tables are made.
    """
    for query in _PLACE_FAULTS:
        for fault in connection.scalars(text(query)):
            raise _unfit_store_error(store_name, fault)


def _unfit_store_error(store_name: str, fault: str) -> UnfitStore:
    """Return the error for a store with ``fault``, which is a clause such as "it has no table relay_meta"."""
    return UnfitStore(
        f"the store {store_name} is not as the relay makes it: {fault}. Undo this, or give the relay an empty store: a new file, "
        "or a separate PostgreSQL database (but roles belong to the whole server). The relay makes its tables itself. "
        "If another version of ldpfl made this store: let that version end its rounds, then issue the tokens anew in an empty store"
    )


_SQLITE_OBJECTS = text("SELECT type, name, tbl_name, sql FROM sqlite_master")


def _sqlite_faults(connection: Connection) -> Iterator[str]:
    """Yield how the tables, indexes and other objects of a SQLite store differ from those of a new store, which is made in memory."""
    present = _sqlite_objects(connection)
    new_engine = create_engine("sqlite://")
    with new_engine.begin() as new_store:
        metadata.create_all(new_store)
        expected = _sqlite_objects(new_store)
    new_engine.dispose()
    for kind, name, *_ in sorted(present - expected):
        yield f"its {kind} {name} is not the relay's"
    for kind, name, *_ in sorted(expected - present):
        yield f"it has no {kind} {name}"


def _sqlite_objects(connection: Connection) -> set[tuple[str, ...]]:
    """Return (type, name, table, SQL) of all objects of a SQLite database. Runs of blanks in the SQL become one blank."""
    return {tuple(" ".join((part or "").split()) for part in row) for row in connection.execute(_SQLITE_OBJECTS)}


_SCHEMA_ID = f"(SELECT oid FROM pg_namespace WHERE nspname = '{SCHEMA}')"
_TABLES = f"(SELECT oid FROM pg_class WHERE relkind NOT IN ('i', 'S') AND relnamespace = {_SCHEMA_ID})"
_STORED = f"(SELECT oid, reltype, reltoastrelid FROM pg_class WHERE relkind IN ('r', 'i', 'S') AND relnamespace = {_SCHEMA_ID}) AS stored"
_WITH_FILES = f"""(
    SELECT oid FROM pg_class WHERE relnamespace = {_SCHEMA_ID}
    UNION SELECT reltoastrelid FROM {_STORED}
    UNION SELECT indexrelid FROM pg_index WHERE indrelid IN (SELECT reltoastrelid FROM {_STORED})
)"""
_MY_ROLE = "(SELECT oid FROM pg_roles WHERE rolname = current_user)"
_FIRST_USER_OID = 16384  # objects with lower numbers are PostgreSQL's own

_OBJECTS = f"""(
    SELECT CAST('pg_namespace' AS regclass) AS class, oid AS object FROM pg_namespace WHERE nspname = '{SCHEMA}'
    UNION SELECT 'pg_class', oid FROM {_STORED}
    UNION SELECT 'pg_class', reltoastrelid FROM {_STORED} WHERE reltoastrelid <> 0
    UNION SELECT 'pg_class', indexrelid FROM pg_index WHERE indrelid IN (SELECT reltoastrelid FROM {_STORED})
    UNION SELECT 'pg_type', pg_type.oid FROM pg_type, {_STORED}
        WHERE stored.oid = typrelid OR typelem <> 0 AND typelem = stored.reltype AND typarray = 0
    UNION SELECT 'pg_attrdef', oid FROM pg_attrdef WHERE adrelid IN (SELECT oid FROM {_STORED})
    UNION SELECT 'pg_constraint', oid FROM pg_constraint WHERE conrelid IN (SELECT oid FROM {_STORED})
    UNION SELECT 'pg_trigger', pg_trigger.oid FROM pg_trigger JOIN pg_constraint ON pg_constraint.oid = tgconstraint
        WHERE tgisinternal AND conrelid IN (SELECT oid FROM {_STORED})
) AS own"""
"""The schema, tables, indexes and sequences in it, and what PostgreSQL makes for these: tables for long values, row types, defaults,
constraints, and the triggers of foreign keys. Other queries check whether they are as the relay makes them."""

_PLACE_FAULTS = (
    f"""SELECT 'the schema ' || nspname || ' belongs to ' || pg_get_userbyid(nspowner)
    FROM pg_namespace WHERE oid = {_SCHEMA_ID} AND nspowner <> {_MY_ROLE}""",
    f"""SELECT 'others have rights in the schema ' || nspname
    FROM pg_namespace, aclexplode(nspacl) AS given WHERE pg_namespace.oid = {_SCHEMA_ID} AND given.grantee <> nspowner""",
    """SELECT 'its database has the event trigger ' || evtname FROM pg_event_trigger WHERE evtenabled <> 'D'""",
    # Others' foreign keys, whose actions run as the relay; views, rules, policies, statistics, publications, functions, defaults, children.
    f"""SELECT pg_describe_object(classid, objid, objsubid) || ' depends on ' || pg_describe_object(refclassid, refobjid, refobjsubid)
    FROM pg_depend WHERE (refclassid, refobjid) IN (SELECT * FROM {_OBJECTS}) AND (classid, objid) NOT IN (SELECT * FROM {_OBJECTS})
    ORDER BY 1""",
)
"""Queries for what is wrong with the place. Each row that a query returns is one fault, as text."""

_ALL_DATA_ROLES = "'pg_read_all_data', 'pg_write_all_data', 'pg_read_server_files', 'pg_write_server_files', 'pg_execute_server_program'"
_CAN_ADD_MEMBERS = "(held.rolcreaterole AND CAST(current_setting('server_version_num') AS integer) < 160000)"
"""Until PostgreSQL 16, whoever may make roles may make members of any role that is no superuser."""

_RESTRICTED = """(
    SELECT objoid AS function, initprivs FROM pg_init_privs
    WHERE classoid = CAST('pg_proc' AS regclass) AND NOT EXISTS (SELECT FROM aclexplode(initprivs) WHERE grantee = 0)
) AS restricted"""
"""Functions of PostgreSQL and of extensions that not everybody may call when they are installed.

Among them are all functions that read files, pages or the write-ahead log and are protected only by these rights. Other such functions
check that a superuser calls. The functions are not listed here, since each version of PostgreSQL and each extension has others.
"""

_ONLY_RESETS_STATISTICS = """(
    lanname = 'internal' AND prosrc ~ '^pg_stat_reset(_|$)'
    OR lanname = 'c' AND probin = '$libdir/pg_stat_statements' AND prosrc ~ '^pg_stat_statements_reset(_|$)'
)"""
"""Whether a function only resets PostgreSQL's statistics. Monitoring programs may call it, because it reads nothing and runs nothing.

The code that runs is compared, not the function's name. Only superusers make functions in these two languages.
"""

_RELATION_RIGHTS = """(
    SELECT oid AS relation, 0 AS number, relacl AS acl FROM pg_class
    UNION ALL SELECT attrelid, attnum, attacl FROM pg_attribute WHERE attacl IS NOT NULL
) AS rights"""
"""Rights in whole tables and views, and in their columns, whose numbers begin at 1."""

_TO_REVOKE = "CAST(function AS regprocedure) || ' FROM ' || coalesce(quote_ident(rolname), 'PUBLIC')"

_RIGHTS_FAULTS = (
    f"""SELECT relname || ' belongs to ' || pg_get_userbyid(relowner)
    FROM pg_class WHERE relnamespace = {_SCHEMA_ID} AND relowner <> {_MY_ROLE}""",
    f"""SELECT 'others have rights in ' || CASE WHEN number = 0 THEN '' ELSE 'a column of ' END || relname
    FROM {_RELATION_RIGHTS} JOIN pg_class ON oid = relation, aclexplode(acl) AS given
    WHERE relation IN {_WITH_FILES} AND given.grantee <> relowner""",
    # PostgreSQL 16 gives whoever made a role a membership that may only be handed on, and only a superuser can revoke it. It is accepted,
    # because a hosted server has no superuser. Its holder can make itself a full member later: docs/relay.md says so.
    f"""SELECT pg_get_userbyid(member) || ' is a member of the role ' || current_user
    FROM pg_auth_members JOIN pg_roles ON pg_roles.oid = member
    WHERE roleid = {_MY_ROLE} AND NOT rolsuper
    AND (coalesce(CAST(to_jsonb(pg_auth_members)->>'inherit_option' AS boolean), true)
        OR coalesce(CAST(to_jsonb(pg_auth_members)->>'set_option' AS boolean), true))""",
    # Members of a role that reads or writes everything, such as pg_read_all_data.
    f"""SELECT rolname || ' may use ' || relname
    FROM pg_roles, pg_class
    WHERE relnamespace = {_SCHEMA_ID} AND relkind = 'r'
    AND NOT rolsuper AND rolname <> current_user AND pg_roles.oid >= {_FIRST_USER_OID}
    AND has_table_privilege(pg_roles.oid, pg_class.oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, TRIGGER')""",
    # Rights that a role has without inheriting them: it may take a role on, or the server acts for it. A role that nobody may log in as
    # counts as well: it may own a function with SECURITY DEFINER, which acts with the role's rights for everybody.
    f"""SELECT others.rolname || ' may reach the rows as ' || held.rolname
        || CASE WHEN held.rolsuper THEN ', which is a superuser' WHEN held.rolreplication THEN ', which has REPLICATION'
            WHEN {_CAN_ADD_MEMBERS} THEN ', which has CREATEROLE' ELSE '' END
    FROM pg_roles AS others JOIN pg_roles AS held ON pg_has_role(others.oid, held.oid, 'MEMBER')
    WHERE NOT others.rolsuper AND others.oid <> {_MY_ROLE}
    AND (others.oid >= {_FIRST_USER_OID} OR others.oid <> held.oid)
    AND (held.rolname IN ({_ALL_DATA_ROLES}) OR held.rolsuper OR held.rolreplication OR {_CAN_ADD_MEMBERS})
    ORDER BY others.rolcanlogin DESC, 1""",
    # An update of an extension may list later grants among the first ones, so only PostgreSQL's own roles are accepted from there.
    f"""SELECT coalesce(rolname, 'PUBLIC') || ' may call a function that is not for everybody: REVOKE EXECUTE ON FUNCTION ' || {_TO_REVOKE}
    FROM {_RESTRICTED} JOIN pg_proc ON pg_proc.oid = function JOIN pg_language ON pg_language.oid = prolang,
    aclexplode(coalesce(proacl, acldefault('f', proowner))) AS given
    LEFT JOIN pg_roles ON pg_roles.oid = grantee
    WHERE rolsuper IS NOT TRUE AND (NOT {_ONLY_RESETS_STATISTICS} OR grantee = proowner)
    AND (grantee >= {_FIRST_USER_OID} OR grantee NOT IN (SELECT initial.grantee FROM aclexplode(initprivs) AS initial)) ORDER BY 1""",
    # Files are of the whole server. Of other databases only these are seen: PostgreSQL's own functions, which have the same numbers in
    # all databases, and the roles that have rights in them or own them.
    f"""SELECT rolname || ' may call a function that is not for everybody, in the database ' || datname
        || ': REVOKE EXECUTE ON FUNCTION ' || {_TO_REVOKE}
    FROM {_RESTRICTED} JOIN pg_shdepend ON objid = function AND classid = CAST('pg_proc' AS regclass)
    JOIN pg_proc ON pg_proc.oid = function JOIN pg_language ON pg_language.oid = prolang
    JOIN pg_roles ON pg_roles.oid = refobjid JOIN pg_database ON pg_database.oid = dbid
    WHERE (NOT {_ONLY_RESETS_STATISTICS} OR deptype = 'o') AND function < {_FIRST_USER_OID}
    AND refclassid = CAST('pg_authid' AS regclass) AND deptype IN ('a', 'o') AND NOT rolsuper
    ORDER BY 1""",
    f"""SELECT 'the function ' || proname || ' lets others act as the relay'
    FROM pg_proc WHERE prosecdef AND proowner = {_MY_ROLE} AND oid >= {_FIRST_USER_OID}""",
    """SELECT 'functions in the language ' || lanname || ' run as the server, but it is marked as trusted, so that roles may write them: '
        || 'UPDATE pg_language SET lanpltrusted = false WHERE lanname = ' || quote_literal(lanname)
    FROM pg_language WHERE lanpltrusted AND oid <> 14 AND (lanplcallfoid = 0 OR EXISTS (
        SELECT FROM pg_proc WHERE pg_proc.oid IN (lanplcallfoid, laninline)
        AND NOT (probin ~ '^[$]libdir/pl(pgsql|perl|tcl)$' AND prosrc ~ '^pl(pgsql|perl|tcl)_(call|inline)_handler$')))""",
    # Whoever may write to a catalog can become a superuser. Catalogs are in the schemas 11 and 99, pg_catalog and pg_toast. Two kinds of
    # rights are accepted: those that everybody has from the start, in a table or a column, and those of PostgreSQL's own roles.
    f"""SELECT coalesce(rolname, 'PUBLIC') || ' has rights in a table that is not for everybody: REVOKE '
        || string_agg(privilege_type || coalesce(' (' || quote_ident(attname) || ')', ''), ', ' ORDER BY attnum, privilege_type)
        || ' ON ' || CAST(CAST(relation AS regclass) AS text) || ' FROM ' || coalesce(quote_ident(rolname), 'PUBLIC')
    FROM {_RELATION_RIGHTS} CROSS JOIN aclexplode(acl) AS given
    LEFT JOIN pg_roles ON pg_roles.oid = grantee LEFT JOIN pg_attribute ON attrelid = relation AND attnum = number AND number <> 0
    WHERE rolsuper IS NOT TRUE AND relation IN (
        SELECT oid FROM pg_class WHERE oid < {_FIRST_USER_OID} AND relnamespace IN (11, 99)
        UNION SELECT objoid FROM pg_init_privs WHERE classoid = CAST('pg_class' AS regclass) AND objsubid = 0
        AND NOT EXISTS (SELECT FROM aclexplode(initprivs) AS initial WHERE initial.grantee = 0))
    AND NOT EXISTS (SELECT FROM pg_init_privs, aclexplode(initprivs) AS initial
        WHERE classoid = CAST('pg_class' AS regclass) AND objoid = relation AND objsubid IN (0, number)
        AND initial.privilege_type = given.privilege_type
        AND (initial.grantee = 0 OR initial.grantee = given.grantee AND given.grantee < {_FIRST_USER_OID}))
    GROUP BY relation, rolname ORDER BY 1""",
    f"""SELECT coalesce(rolname, 'PUBLIC') || ' may call a function that runs as the server: REVOKE EXECUTE ON FUNCTION '
        || CAST(CAST(pg_proc.oid AS regprocedure) AS text) || ' FROM ' || coalesce(quote_ident(rolname), 'PUBLIC')
    FROM pg_proc CROSS JOIN aclexplode(coalesce(proacl, acldefault('f', proowner))) AS given
    LEFT JOIN pg_roles ON pg_roles.oid = grantee
    WHERE prolang IN (12, 13) AND pg_proc.oid >= {_FIRST_USER_OID} AND rolsuper IS NOT TRUE AND NOT EXISTS (
        SELECT FROM pg_depend WHERE classid = CAST('pg_proc' AS regclass) AND objid = pg_proc.oid AND deptype = 'e') ORDER BY 1""",
    # The options are hidden from the relay: among them may be the relay's name, with password_required 'false'.
    """SELECT coalesce(rolname, 'PUBLIC') || ' has a user mapping, which may let it act as the relay: DROP USER MAPPING FOR '
        || coalesce(quote_ident(rolname), 'PUBLIC') || ' SERVER ' || quote_ident(srvname)
    FROM pg_user_mappings LEFT JOIN pg_roles ON pg_roles.oid = umuser
    WHERE rolsuper IS NOT TRUE AND rolname IS DISTINCT FROM current_user ORDER BY 1""",
)

_PARAMETER_FAULTS = """SELECT coalesce(rolname, 'PUBLIC') || ' may change the server''s configuration: REVOKE ' || privilege_type
        || ' ON PARAMETER ' || parname || ' FROM ' || coalesce(quote_ident(rolname), 'PUBLIC')
    FROM pg_parameter_acl CROSS JOIN aclexplode(paracl) AS given LEFT JOIN pg_roles ON pg_roles.oid = grantee
    WHERE rolsuper IS NOT TRUE AND (privilege_type = 'ALTER SYSTEM' OR parname !~ '^(log|track)_[a-z_]+$'
        AND parname NOT IN ('deadlock_timeout', 'lc_messages', 'session_replication_role', 'temp_file_limit')
        AND NOT EXISTS (SELECT FROM pg_settings WHERE name = parname AND context = 'user')) ORDER BY 1"""
"""A parameter can be a command that the server runs, or, also in one session, a library or code. Such rights exist since version 15."""

_OBJECT_FAULTS = (
    f"""SELECT relname || ' is not an ordinary table'
    FROM pg_class LEFT JOIN pg_am ON pg_am.oid = relam WHERE relnamespace = {_SCHEMA_ID}
    AND (relkind NOT IN ('r', 'i', 'S') OR relpersistence <> 'p' OR reloftype <> 0 OR relispartition
        OR (relkind = 'r' AND amname <> 'heap'))""",
    f"""SELECT relname || ' has storage parameters: ' || CAST(reloptions AS text)
    FROM pg_class WHERE oid IN {_WITH_FILES} AND reloptions IS NOT NULL""",
    f"""SELECT relname || ' lies in another tablespace'
    FROM pg_class WHERE oid IN {_WITH_FILES} AND reltablespace <> 0""",
    f"""SELECT 'a column of ' || relname || ' has options: ' || CAST(attoptions AS text)
    FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid WHERE attrelid IN {_WITH_FILES} AND attoptions IS NOT NULL""",
    f"""SELECT relname || ' is written to by a subscription'
    FROM pg_subscription_rel JOIN pg_class ON pg_class.oid = srrelid WHERE relnamespace = {_SCHEMA_ID}""",
    f"""SELECT relname || ' has row security'
    FROM pg_class WHERE relnamespace = {_SCHEMA_ID}
    AND (relrowsecurity OR relforcerowsecurity OR EXISTS (SELECT FROM pg_policy WHERE polrelid = pg_class.oid))""",
    f"""SELECT relname || ' inherits from ' || CAST(CAST(inhparent AS regclass) AS text)
    FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid WHERE inhrelid IN {_TABLES}""",
    f"""SELECT relname || ' has another replica identity, which copies rows to the write-ahead log'
    FROM pg_class WHERE oid IN {_TABLES} AND relkind = 'r' AND relreplident <> 'd'""",
    f"""SELECT 'the trigger ' || tgname || CASE WHEN tgisinternal AND tgenabled <> 'O' THEN ' is switched off' ELSE ' is on a table' END
    FROM pg_trigger WHERE tgrelid IN {_TABLES}
    AND (tgenabled <> 'O' OR (CAST('pg_trigger' AS regclass), oid) NOT IN (SELECT * FROM {_OBJECTS}))""",
    f"""SELECT 'the publication ' || pubname || ' sends its rows elsewhere'
    FROM pg_publication_tables WHERE schemaname = '{SCHEMA}'""",
    f"""SELECT 'the index ' || pg_class.relname || ' is not an ordinary index'
    FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid JOIN pg_am ON pg_am.oid = relam WHERE indrelid IN {_TABLES}
    AND (amname <> 'btree' OR indexprs IS NOT NULL OR indpred IS NOT NULL OR NOT indisvalid OR NOT indimmediate
        OR indisexclusion OR indnkeyatts <> indnatts OR EXISTS (SELECT FROM unnest(indoption) AS option WHERE option <> 0)
        OR EXISTS (SELECT FROM unnest(indcollation) AS collation_of WHERE collation_of NOT IN (0, 100))
        OR EXISTS (SELECT FROM pg_opclass WHERE oid = ANY(indclass) AND (oid >= {_FIRST_USER_OID} OR NOT opcdefault)))""",
)

_COLUMNS = text(
    f"""SELECT relname, attname, format_type(atttypid, atttypmod), attnotnull, coalesce(pg_get_expr(adbin, adrelid), ''),
    attidentity = '' AND attgenerated = '' AND attcollation IN (0, 100), coalesce(attstattarget, -1) = 0, attstorage = 'e'
    FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
    WHERE attnum > 0 AND NOT attisdropped AND attrelid IN {_TABLES}"""
)

_CONSTRAINTS = text(
    f"""SELECT relname, CAST(contype AS text),
    ARRAY(SELECT CAST(attname AS text) FROM unnest(conkey) WITH ORDINALITY AS keys(number, place)
        JOIN pg_attribute ON attrelid = conrelid AND attnum = number ORDER BY place),
    CASE WHEN confrelid = 0 THEN '' ELSE CAST(CAST(confrelid AS regclass) AS text) END,
    ARRAY(SELECT CAST(attname AS text) FROM unnest(confkey) WITH ORDINALITY AS keys(number, place)
        JOIN pg_attribute ON attrelid = confrelid AND attnum = number ORDER BY place),
    convalidated AND NOT condeferrable AND conislocal
        AND (contype <> 'f' OR confdeltype = 'a' AND confupdtype = 'a' AND confmatchtype = 's')
    FROM pg_constraint JOIN pg_class ON pg_class.oid = conrelid WHERE conrelid IN {_TABLES} AND contype <> 'n'"""
)
"""All but those of columns that are not null, which PostgreSQL 18 lists as well."""

_INDEXES = text(
    f"""SELECT relname,
    ARRAY(SELECT CAST(attname AS text) FROM unnest(indkey) WITH ORDINALITY AS keys(number, place)
        JOIN pg_attribute ON attrelid = indrelid AND attnum = number ORDER BY place), indisunique
    FROM pg_index JOIN pg_class ON pg_class.oid = indrelid WHERE indrelid IN {_TABLES}"""
)

_SEQUENCES = text(
    f"""SELECT relname, coalesce(owner, ''), format_type(seqtypid, NULL), seqstart, seqincrement, seqmin, seqmax, seqcache, seqcycle
    FROM pg_sequence JOIN pg_class ON pg_class.oid = seqrelid
    LEFT JOIN (SELECT objid, CAST(attrelid AS regclass) || '.' || attname AS owner FROM pg_depend
        JOIN pg_attribute ON attrelid = refobjid AND attnum = refobjsubid
        WHERE classid = CAST('pg_class' AS regclass) AND refclassid = classid AND deptype = 'a') AS owned ON objid = seqrelid
    WHERE relnamespace = {_SCHEMA_ID}"""
)


def _postgres_faults(connection: Connection) -> Iterator[str]:
    """Yield the faults of a PostgreSQL store, as clauses for an error: around its schema, in the rights and in the tables.

    For columns, constraints, indexes and sequences, the rows that the database lists are compared with those of the relay's own tables.
    """
    has_parameter_rights = (connection.dialect.server_version_info or (0,)) >= (15,)  # such rights exist since version 15
    parameter_faults = (_PARAMETER_FAULTS,) if has_parameter_rights else ()
    for query in (*_PLACE_FAULTS, *_RIGHTS_FAULTS, *parameter_faults, *_OBJECT_FAULTS):
        yield from connection.scalars(text(query))
    tables = metadata.sorted_tables
    columns = (tuple(row) for row in connection.execute(_COLUMNS))
    yield from _differences("column", (_expected_column(column) for table in tables for column in table.columns), columns)
    constraints = (
        (table, kind, *keys, other_table, *other_keys, is_as_usual)
        for table, kind, keys, other_table, other_keys, is_as_usual in connection.execute(_CONSTRAINTS)
    )
    yield from _differences("constraint", (described for table in tables for described in _expected_constraints(table)), constraints)
    indexes = ((name, *keys, unique) for name, keys, unique in connection.execute(_INDEXES))
    yield from _differences("index", (described for table in tables for described in _expected_indexes(table)), indexes)
    sequences = (tuple(row) for row in connection.execute(_SEQUENCES))
    yield from _differences("sequence", (described for table in tables for described in _expected_sequences(table)), sequences)


def _differences(kind: str, expected: Iterable[tuple[object, ...]], present: Iterable[tuple[object, ...]]) -> Iterator[str]:
    """Yield a fault for each row that is ``present`` and not ``expected``, or the reverse, duplicates included.

    A row describes one object of this ``kind``, such as a column, as a tuple.
    """
    expected_counts, present_counts = Counter(expected), Counter(present)
    for row in sorted(map(repr, present_counts - expected_counts)):
        yield f"the {kind} {row} is not the relay's"
    for row in sorted(map(repr, expected_counts - present_counts)):
        yield f"it has no {kind} {row}"


_DIALECT: Dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
_TYPES = {"integer": "integer", "bigint": "bigint", "float(53)": "double precision", "bytea": "bytea"}


def _expected_column(column: Column[object]) -> tuple[object, ...]:
    """Return ``column`` as :data:`_COLUMNS` should read it. True: its values are stored, not computed, and have the usual collation."""
    table = column.table
    kind = column.type.compile(_DIALECT).lower()
    default = f"nextval('{SCHEMA}.{table.name}_{column.name}_seq'::regclass)" if column is table.autoincrement_column else ""
    kind = _TYPES.get(kind) or kind.replace("varchar", "character varying")
    is_incompressible = column in set(INCOMPRESSIBLE)  # in a set, because == of two columns makes SQL and compares nothing
    return (table.name, column.name, kind, not column.nullable, default, True, table in WITHOUT_SAMPLES, is_incompressible)


def _expected_constraints(table: Table) -> Iterator[tuple[object, ...]]:
    """Yield the table's constraints as :data:`_CONSTRAINTS` should read them, in one flat tuple each.

    The letters are PostgreSQL's, for a foreign key, a primary key or a unique constraint. True says that its options are the usual ones.
    """
    for constraint in table.constraints:
        keys = tuple(column.name for column in constraint.columns)  # type: ignore[attr-defined]
        if isinstance(constraint, ForeignKeyConstraint):
            other_keys = (element.column.name for element in constraint.elements)
            yield (table.name, "f", *keys, f"{SCHEMA}.{constraint.referred_table.name}", *other_keys, True)
        elif keys and isinstance(constraint, PrimaryKeyConstraint | UniqueConstraint):  # no keys: the table has no primary key
            yield (table.name, "p" if isinstance(constraint, PrimaryKeyConstraint) else "u", *keys, "", True)


def _expected_indexes(table: Table) -> Iterator[tuple[object, ...]]:
    """Yield the table's indexes as :data:`_INDEXES` should read them, in one flat tuple each."""
    for constraint in table.constraints:
        # PostgreSQL makes a unique index for each of these constraints. A table without a primary key has one without columns here.
        if isinstance(constraint, PrimaryKeyConstraint | UniqueConstraint) and constraint.columns:
            yield (table.name, *(column.name for column in constraint.columns), True)
    for index in table.indexes:
        yield (table.name, *(column.name for column in index.columns), bool(index.unique))


def _expected_sequences(table: Table) -> Iterator[tuple[object, ...]]:
    """Yield the sequence that numbers the table's rows, if any, as :data:`_SEQUENCES` should read it."""
    column = table.autoincrement_column
    if column is not None:
        name = f"{table.name}_{column.name}"
        # The numbers are the start, increment, minimum, maximum and cache; False says that it does not begin anew after the maximum.
        yield (f"{name}_seq", f"{SCHEMA}.{table.name}.{column.name}", "bigint", 1, 1, 1, 2**63 - 1, 1, False)
