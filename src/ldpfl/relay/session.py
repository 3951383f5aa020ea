"""Settings of a connection to PostgreSQL, and the role that it runs as. Each connection makes its own, and reads them back.

``ALTER DATABASE ... SET`` and ``ALTER ROLE ... SET`` can set nearly all of them for the relay, so nothing is left as it was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg

from ldpfl.relay.errors import UnfitStore

ISOLATION = "READ COMMITTED"
"""A transaction that has waited for a round's lock must see what the lock's last holder has committed. Stricter levels take one snapshot,
before the wait, so two relays would release the same round."""

SETTINGS = {
    "quote_all_identifiers": "off",  # first, since search_path is kept as it was quoted; and definitions are compared as text
    # Tables are named with their schema. Nothing is looked for in a schema in which others may have put functions or operators.
    "search_path": "pg_catalog, pg_temp",
    "role": "none",  # ALTER ROLE ... SET role would have the connection act as another role
    "default_transaction_isolation": ISOLATION.lower(),
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    "synchronous_commit": "on",  # what was acknowledged to a client is on the disk
    "row_security": "off",  # a policy that would hide rows is an error
    "client_min_messages": "notice",  # warnings are faults, and must come through
    "client_encoding": "UTF8",
    "extra_float_digits": "1",  # deadlines are read as they were written
    "default_tablespace": "",
    "default_table_access_method": "heap",
    "debug_print_parse": "off",  # these three write statements to the server's log, values included
    "debug_print_rewritten": "off",
    "debug_print_plan": "off",
    "vacuum_cost_delay": "0",
    "lock_timeout": "5s",  # who waits for a round that is being mixed keeps a thread
    "statement_timeout": "1min",
    "idle_in_transaction_session_timeout": "1min",  # a relay that hangs, or has lost its network, must not hold a round
}
_SETTINGS_SINCE = {
    130_000: {"log_parameter_max_length_on_error": "0"},
    140_000: {"idle_session_timeout": "0"},
    170_000: {"transaction_timeout": "0"},
}
_TCP_SETTINGS = {"tcp_user_timeout": "30s", "tcp_keepalives_idle": "10", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "3"}
"""Settings by which the server closes a connection to a relay that no longer reads. On a Unix socket the server shows them as 0."""

_CHECKED_ONLY = {
    "transaction_isolation": ISOLATION.lower(),
    "transaction_read_only": "off",
    "session_replication_role": "origin",  # otherwise foreign keys are not checked; only a superuser can change it, and the next two
    "zero_damaged_pages": "off",  # these two turn a damaged page into rows that are missing without a word
    "ignore_checksum_failure": "off",
}
"""Settings that are read only."""

_LOGGED_VALUE_LENGTH = "log_parameter_max_length"
_LOGS_STATEMENTS = {
    "log_statement": ("none", "ddl"),
    "log_min_duration_statement": ("-1",),
    "log_min_duration_sample": ("-1",),
    "log_transaction_sample_rate": ("0",),
}
_LOGS_VALUES = {"auto_explain.log_min_duration": ("-1",), "pgaudit.log_parameter": ("off",)}
"""Settings by which the server would keep clients' names and reports, and their values that do not."""

_SET_AT_START = {
    "fsync": ("on", "after a crash of its machine a round that was released may be open again", ""),
    "full_page_writes": ("on", "a crash of its machine may damage the store", ""),
    "track_commit_timestamp": ("off", "it stores when each row came", ""),
    "max_prepared_transactions": (
        "0",
        "a prepared transaction of another role can hold the relay's locks while nobody is connected",
        "end each one (SELECT gid, owner, database FROM pg_prepared_xacts; in that database ROLLBACK PREPARED 'GID'), then ",
    ),
}
"""Settings of the whole server, which a restart changes: the value that the relay needs, the harm of others, what to do before a change."""

_QUERY_STRONG_RIGHTS = """SELECT rolname,
    CASE WHEN rolsuper THEN 'SUPERUSER' WHEN rolreplication THEN 'REPLICATION' ELSE 'BYPASSRLS' END
    FROM pg_roles WHERE (rolsuper OR rolreplication OR rolbypassrls) AND pg_has_role(session_user, oid, 'MEMBER')
    ORDER BY rolname <> session_user, rolname LIMIT 1"""

_QUERY_LOGICAL_SLOT = """SELECT slot_name FROM pg_replication_slots
    WHERE slot_type = 'logical' AND database = current_database() ORDER BY slot_name LIMIT 1"""

_QUERY_PLANTED_CODE = """SELECT 'DROP ' || upper(described.type) || ' ' || described.identity
    FROM (SELECT tableoid AS class, oid, proowner AS owner FROM pg_proc WHERE pronamespace = '11'
        UNION ALL SELECT tableoid, oid, oprowner FROM pg_operator WHERE oprnamespace = '11'
        UNION ALL SELECT tableoid, oid, typowner FROM pg_type
            WHERE typnamespace = '11' AND typrelid = '0' AND typelem = '0' AND typtype <> 'm'
        UNION ALL SELECT tableoid, oid, conowner FROM pg_conversion WHERE connamespace = '11'
        UNION ALL SELECT tableoid, oid, opcowner FROM pg_opclass WHERE opcdefault AND opcintype < '16384' AND opcmethod IN ('403', '405')
        UNION ALL SELECT tableoid, oid, '10' FROM pg_cast WHERE castsource < '16384' AND casttarget < '16384') AS code
    JOIN pg_roles ON pg_roles.oid = owner, pg_identify_object(class, code.oid, 0) AS described
    WHERE code.oid >= '16384' AND NOT (rolsuper
        AND EXISTS (SELECT FROM pg_depend WHERE classid = class AND objid = code.oid AND deptype = 'e'))
    UNION ALL SELECT 'REVOKE CREATE ON SCHEMA pg_catalog FROM ' || coalesce(quote_ident(CAST(rolname AS text)), 'PUBLIC')
    FROM pg_namespace CROSS JOIN aclexplode(nspacl) AS given LEFT JOIN pg_roles ON pg_roles.oid = grantee
    WHERE pg_namespace.oid = '11' AND privilege_type = 'CREATE' AND rolsuper IS NOT TRUE"""
"""Code that others have put where each statement of the relay is looked up: in pg_catalog (its number is 11), or as casts and default
operator classes, which have no schema that matters. PostgreSQL's own objects have numbers below 16384; extensions list theirs.

The query runs before such code is ruled out. So each operator and function in it has exactly the types of PostgreSQL's own, which win.
"""


def prepare_session(connection: psycopg.Connection[Any]) -> None:
    """Change the settings of a new connection. Then check that nobody else's code could run in it, its role, its settings, the logs.

    Raises:
        UnfitStore: one of these checks has failed; the message says what to do.
    """
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED  # stated at each BEGIN
    connection.read_only = connection.deferrable = False
    settings = dict(SETTINGS)
    for since, more in _SETTINGS_SINCE.items():
        if connection.info.server_version >= since:
            settings |= more
    # Only SET statements run until search_path is set, the second of SETTINGS. Any other statement could call a function that others have
    # put into a schema that is searched.
    statements = [_set_statement(name, value) for name, value in (settings | _TCP_SETTINGS).items()]
    connection.execute("; ".join(statements).encode())
    connection.commit()  # otherwise a rollback would undo the settings
    _check_no_planted_code(connection)  # before any other query, which such code could falsify
    _check_role(connection)
    _check_settings(connection, settings | _CHECKED_ONLY)
    _check_start_settings(connection)
    _check_log(connection)
    _check_no_logical_slot(connection)
    connection.commit()


def _set_statement(name: str, value: str) -> str:
    """Return the SQL that sets ``name``. A ``value`` may be a list with ", " between its items, each of which SQL quotes by itself."""
    values = ", ".join(f"'{part}'" for part in value.split(", "))
    return f"SET {name} TO {values}"


def _check_no_planted_code(connection: psycopg.Connection[Any]) -> None:
    """Raise if code of another role would run as the relay, or another role may add such code."""
    remedy = connection.execute(_QUERY_PLANTED_CODE.encode()).fetchone()
    if remedy is not None:
        raise UnfitStore(
            f"code of others could run as the relay in the store's database: a superuser must run {remedy[0]}, "
            "or give the relay a separate database"
        )


def _check_role(connection: psycopg.Connection[Any]) -> None:
    """Raise unless the connection acts as the role that it logged in as, and no role that it may act as can evade the tables' rights.

    :data:`_QUERY_STRONG_RIGHTS` finds such a role: a superuser, or one that may replicate the database or bypass row security.
    """
    login, current = connection.execute("SELECT session_user, current_user").fetchone() or ("", "")
    if login != current:
        raise UnfitStore(f"the relay connects to the store's database as {login}, but acts there as {current}: connect as {current}")
    strong_right = connection.execute(_QUERY_STRONG_RIGHTS).fetchone()
    if strong_right is not None:
        name, right = strong_right
        how = f"has {right}" if name == login else f"may act as {name}, which has {right}"
        raise UnfitStore(
            f"the relay connects to its store as {login}, which {how}: give the relay a separate role without this right "
            "(CREATE ROLE relay LOGIN PASSWORD '...'), let its schema belong to that role, and name the role in the store's URL"
        )


def _check_settings(connection: psycopg.Connection[Any], expected: Mapping[str, str]) -> None:
    """Raise unless all settings have their expected values."""
    current = _read_settings(connection, expected)
    for name, value in expected.items():
        if current[name] != value:
            raise UnfitStore(
                f"the store's database has {name} = {current[name]!r} for the relay, which needs {value!r}: "
                f"reset it (ALTER ROLE or ALTER DATABASE ... RESET {name}). If this server is a standby, connect to the primary instead"
            )


def _check_start_settings(connection: psycopg.Connection[Any]) -> None:
    """Raise if a setting of the whole server has a value that the relay cannot use."""
    current = _read_settings(connection, _SET_AT_START)
    for name, (needed, harm, first_step) in _SET_AT_START.items():
        if current[name] != needed:
            raise UnfitStore(
                f"the store's server has {name} = {current[name]}, so {harm}: "
                f"{first_step}set {name} = {needed} in postgresql.conf, and restart the server"
            )


def _check_log(connection: psycopg.Connection[Any]) -> None:
    """Raise an error if the server's log would hold reports and their senders. Only a superuser can change these settings.

    The log holds values if it has statements with their values, or if an extension logs values.
    """
    current = _read_settings(connection, (_LOGGED_VALUE_LENGTH, *_LOGS_STATEMENTS, *_LOGS_VALUES))
    # Statements have placeholders for values. With a length of "0" the server logs no values, so it may log the statements.
    log_settings = dict(_LOGS_VALUES) if current[_LOGGED_VALUE_LENGTH] == "0" else _LOGS_STATEMENTS | _LOGS_VALUES
    for name, silent_values in log_settings.items():
        if current[name] not in (None, "", *silent_values):  # None: the server does not have this setting
            can_omit_values = name in _LOGS_STATEMENTS and current[_LOGGED_VALUE_LENGTH] is not None
            setting, value = (_LOGGED_VALUE_LENGTH, "0") if can_omit_values else (name, silent_values[0])
            raise UnfitStore(
                f"the log of the store's server would hold clients' names and reports, because {name} = {current[name]!r}: a superuser "
                f"must run ALTER ROLE \"{connection.info.user}\" SET {setting} = '{value}'"
            )


def _check_no_logical_slot(connection: psycopg.Connection[Any]) -> None:
    """Raise if a logical replication slot of the database hands each row to whoever reads the slot, also after the row was deleted."""
    try:
        slot = connection.execute(_QUERY_LOGICAL_SLOT.encode()).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        raise UnfitStore(
            "the relay may not see the replication slots of the store's server: run, as a superuser, "
            "GRANT SELECT ON pg_catalog.pg_replication_slots TO ROLE, where ROLE is the role that the relay connects as"
        ) from None
    if slot is not None:
        raise UnfitStore(
            f"the logical replication slot {slot[0]} of the store's database keeps clients' names and reports for whoever reads it: "
            f"end its reader and run, as a superuser, SELECT pg_drop_replication_slot('{slot[0]}'), or give the relay a separate database"
        )


def _read_settings(connection: psycopg.Connection[Any], names: Mapping[str, object] | tuple[str, ...]) -> dict[str, str | None]:
    """Return the current settings by name; None for a setting that this server does not know.

    The ``names`` are constants of this module, so Python's quotes around them will do as SQL's.
    """
    values = connection.execute(f"SELECT {', '.join(f'current_setting({name!r}, true)' for name in names)}".encode()).fetchone()
    return dict(zip(names, values or (), strict=True))
