// tw_vec_reader: the reading half of the vector unit. Loops over an instruction's vectors, makes
// the requests of ports A and B or reads a row of an M half, and tells lanes and writer what was
// read. Implements "Vector unit" of docs/concepts/microarchitecture.md, reader.
//
// Vectors are four nested loops; each stream (A, B, destination) keeps the address of every level
// and adds one step to the level that goes on.
module tw_vec_reader
  import tw_pkg::*;
#(
    parameter int unsigned ADDRESS_BITS,  // of a byte in SRAM
    parameter int unsigned COUNT_BITS,    // of bytes and words of a vector's operand
    parameter int unsigned A_BITS,        // of the number of a word in the lanes' collectors
    parameter int unsigned B_BITS,
    parameter int unsigned CHUNK_BITS,    // of the number of elements of a chunk
    parameter int unsigned RESULT_BITS    // of bytes of a result
) (
    input  logic                          clk,
    input  logic                          rst,
    input  logic [7:0]                    fault,
    input  logic                          start,      // the cycle of the pop
    input  logic [511:0]                  head,
    input  logic                          window,     // another vector may be in flight (state)
    input  logic                          none_left,  // no vector is in flight (state)
    input  logic                          last_left,  // one is (state)
    input  logic                          retire,     // the oldest is finished in this cycle
    output logic                          reading,    // vectors are left to read (state)
    output sram_request_t                 a_request,
    input  logic                          a_granted,
    output sram_request_t                 b_request,
    input  logic                          b_granted,
    input  logic [WB-1:0]                 b_data,
    input  logic [1:0]                    half_full,
    output logic [1:0]                    half_freed,
    output logic                          m_half,
    output logic [$clog2(HALF_ROWS)-1:0]  m_row,
    output logic                          half_awaited,  // a drain could read but for its half
    // To the lanes: words granted in this cycle, and items (an operand to fold) completed in it.
    output logic                          a_take,
    output logic                          b_take,
    output logic [A_BITS-1:0]             a_word,
    output logic [B_BITS-1:0]             b_word,  // of an eltwise
    output logic                          item_done,
    output logic                          item_first,    // of its vector
    output logic [$clog2(W)-1:0]          a_offset,      // of the operand in its first word
    output logic [$clog2(W)-1:0]          b_offset,
    output logic [5:0]                    entry,
    output logic [6:0]                    v_register,
    output logic signed [31:0]            weight,
    output logic                          chunk_first,   // rows: of its pass
    output logic                          pass_first,    // of its row
    output logic                          pass_last,
    output logic [CHUNK_BITS-1:0]         chunk,         // elements of the vector
    output logic                          row_ready,  // rows: all before the last pass is finished
    // The vector is read; also to the writer.
    output logic                          complete,
    output logic                          has_result,  // and writes something
    output logic [ADDRESS_BITS-1:0]       result_address,
    output logic [RESULT_BITS-1:0]        result_bytes
);
  localparam int unsigned WORD_BITS = $clog2(W);
  localparam int unsigned COLUMN_BITS = $clog2(N);
  localparam int unsigned ENTRY_WORDS = (8 + W - 2) / W + 1;  // touched by 8 bytes, at most

  wire f_drain_early = FAULTS_BUILT && fault == FAULT_DRAIN_EARLY;
  wire f_resize_weight = FAULTS_BUILT && fault == FAULT_RESIZE_WEIGHT;

  // The head as each instruction; only some fields matter here.
  /* verilator lint_off UNUSEDSIGNAL */
  vec_param_t   of_param;
  vec_table_t   of_table;
  vec_drain_t   of_drain;
  vec_eltwise_t of_eltwise;
  vec_copy_t    of_copy;
  vec_pool_t    of_pool;
  vec_resize_t  of_resize;
  vec_softmax_t of_softmax;
  vec_layer_norm_t of_norm;
  /* verilator lint_on UNUSEDSIGNAL */
  assign of_param   = vec_param_t'(head);
  assign of_table   = vec_table_t'(head);
  assign of_drain   = vec_drain_t'(head);
  assign of_eltwise = vec_eltwise_t'(head);
  assign of_copy    = vec_copy_t'(head);
  assign of_pool    = vec_pool_t'(head);
  assign of_resize  = vec_resize_t'(head);
  assign of_norm    = vec_layer_norm_t'(head);
  assign of_softmax = vec_softmax_t'(head);

  // What the loops need of an instruction, decoded from the head. Counts are value - 1.
  logic [15:0] last0;
  logic [13:0] last1;
  logic [13:0] last2;
  logic [11:0] last3;
  logic dense;  // level 0 goes in chunks of LANES elements
  logic [3:0][ADDRESS_BITS-1:0] a_step;
  logic [2:0][ADDRESS_BITS-1:0] b_step;
  logic [3:0][ADDRESS_BITS-1:0] d_step;
  logic [ADDRESS_BITS-1:0] a_start;
  logic [ADDRESS_BITS-1:0] b_start;
  logic [ADDRESS_BITS-1:0] d_start;

  always_comb begin
    last0   = '0;
    last1   = '0;
    last2   = '0;
    last3   = '0;
    dense   = 1'b0;
    a_step  = '0;
    b_step  = '0;
    d_step  = '0;
    a_start = '0;
    b_start = '0;
    d_start = '0;
    case (head[7:0])
      OP_VEC_PARAM: begin
        last0     = 16'(of_param.count);
        a_start   = ADDRESS_BITS'(of_param.src);
        a_step[0] = of_param.bias_only ? ADDRESS_BITS'(4 * LANES) : ADDRESS_BITS'(9 * LANES);
      end
      OP_VEC_TABLE: a_start = ADDRESS_BITS'(of_table.src);
      OP_VEC_DRAIN: begin
        last0     = 16'(of_drain.out_w);
        last1     = 14'(of_drain.out_h);
        last2     = 14'(of_drain.oc_blocks);
        d_start   = ADDRESS_BITS'(of_drain.dst);
        d_step[0] = ADDRESS_BITS'(of_drain.ox_stride);
        d_step[1] = ADDRESS_BITS'(of_drain.oy_stride);
        d_step[2] = ADDRESS_BITS'(of_drain.ob_stride);
      end
      OP_VEC_ELTWISE: begin
        dense     = 1'b1;
        last0     = 16'(of_eltwise.n0);
        last1     = of_eltwise.n1;
        last2     = 14'(of_eltwise.n2);
        a_start   = ADDRESS_BITS'(of_eltwise.a);
        b_start   = ADDRESS_BITS'(of_eltwise.b);
        d_start   = ADDRESS_BITS'(of_eltwise.dst);
        a_step[0] = ADDRESS_BITS'(LANES);
        b_step[0] = of_eltwise.b_scalar ? '0 : ADDRESS_BITS'(LANES);
        d_step[0] = ADDRESS_BITS'(LANES);
        a_step[1] = ADDRESS_BITS'(of_eltwise.a_s1);
        b_step[1] = ADDRESS_BITS'(of_eltwise.b_s1);
        d_step[1] = ADDRESS_BITS'(of_eltwise.dst_s1);
        a_step[2] = ADDRESS_BITS'(of_eltwise.a_s2);
        b_step[2] = ADDRESS_BITS'(of_eltwise.b_s2);
        d_step[2] = ADDRESS_BITS'(of_eltwise.dst_s2);
      end
      OP_VEC_COPY: begin
        dense     = of_copy.src_s0 == 18'd1 && of_copy.dst_s0 == 18'd1;
        last0     = of_copy.n0;
        last1     = of_copy.n1;
        last2     = of_copy.n2;
        last3     = of_copy.n3;
        a_start   = ADDRESS_BITS'(of_copy.src);
        d_start   = ADDRESS_BITS'(of_copy.dst);
        a_step[0] = dense ? ADDRESS_BITS'(LANES) : ADDRESS_BITS'(of_copy.src_s0);
        d_step[0] = dense ? ADDRESS_BITS'(LANES) : ADDRESS_BITS'(of_copy.dst_s0);
        a_step[1] = ADDRESS_BITS'(of_copy.src_s1);
        d_step[1] = ADDRESS_BITS'(of_copy.dst_s1);
        a_step[2] = ADDRESS_BITS'(of_copy.src_s2);
        d_step[2] = ADDRESS_BITS'(of_copy.dst_s2);
        a_step[3] = ADDRESS_BITS'(of_copy.src_s3);
        d_step[3] = ADDRESS_BITS'(of_copy.dst_s3);
      end
      OP_VEC_POOL: begin
        dense     = 1'b1;
        last0     = 16'(of_pool.n0);
        last1     = 14'(of_pool.out_w);
        last2     = 14'(of_pool.out_h);
        a_start   = ADDRESS_BITS'(of_pool.src);
        d_start   = ADDRESS_BITS'(of_pool.dst);
        a_step[0] = ADDRESS_BITS'(LANES);
        d_step[0] = ADDRESS_BITS'(LANES);
        a_step[1] = ADDRESS_BITS'(of_pool.src_sx);
        d_step[1] = ADDRESS_BITS'(of_pool.dst_sx);
        a_step[2] = ADDRESS_BITS'(of_pool.src_sy);
        d_step[2] = ADDRESS_BITS'(of_pool.dst_sy);
      end
      OP_VEC_RESIZE: begin
        // Stream A moves over the channels only: the tables give the rest. Stream B is the
        // column table's entry, which starts again with every row.
        dense     = 1'b1;
        last0     = 16'(of_resize.n0);
        last1     = 14'(of_resize.out_w);
        last2     = 14'(of_resize.out_h);
        a_start   = ADDRESS_BITS'(of_resize.src);
        b_start   = ADDRESS_BITS'(of_resize.table_x);
        d_start   = ADDRESS_BITS'(of_resize.dst);
        a_step[0] = ADDRESS_BITS'(LANES);
        b_step[1] = ADDRESS_BITS'(8);
        d_step[0] = ADDRESS_BITS'(LANES);
        d_step[1] = ADDRESS_BITS'(of_resize.dst_sx);
        d_step[2] = ADDRESS_BITS'(of_resize.dst_sy);
      end
      OP_VEC_SOFTMAX: begin
        // Level 1 goes over the passes, which begin at the row's first element again.
        dense     = 1'b1;
        last0     = 16'(of_softmax.n0);
        last1     = 14'd2;
        last2     = of_softmax.n1;
        last3     = of_softmax.n2;
        a_start   = ADDRESS_BITS'(of_softmax.src);
        d_start   = ADDRESS_BITS'(of_softmax.dst);
        a_step[0] = ADDRESS_BITS'(LANES);
        d_step[0] = ADDRESS_BITS'(LANES);
        a_step[2] = ADDRESS_BITS'(of_softmax.src_s1);
        d_step[2] = ADDRESS_BITS'(of_softmax.dst_s1);
        a_step[3] = ADDRESS_BITS'(of_softmax.src_s2);
        d_step[3] = ADDRESS_BITS'(of_softmax.dst_s2);
      end
      OP_VEC_LAYER_NORM: begin
        // Stream B, the parameters, begins again with every pass.
        dense     = 1'b1;
        last0     = 16'(of_norm.n0);
        last1     = 14'd1;
        last2     = of_norm.n1;
        last3     = of_norm.n2;
        a_start   = ADDRESS_BITS'(of_norm.src);
        b_start   = ADDRESS_BITS'(of_norm.params);
        d_start   = ADDRESS_BITS'(of_norm.dst);
        a_step[0] = ADDRESS_BITS'(LANES);
        b_step[0] = ADDRESS_BITS'(6 * LANES);
        d_step[0] = ADDRESS_BITS'(LANES);
        a_step[2] = ADDRESS_BITS'(of_norm.src_s1);
        d_step[2] = ADDRESS_BITS'(of_norm.dst_s1);
        a_step[3] = ADDRESS_BITS'(of_norm.src_s2);
        d_step[3] = ADDRESS_BITS'(of_norm.dst_s2);
      end
      default: ;
    endcase
  end

  // The instruction being read.
  logic [7:0] opcode_q;
  logic bias_only_q;
  logic scalar_q;
  logic raw_q;
  logic dense_q;
  logic [15:0] last0_q;
  logic [13:0] last1_q;
  logic [13:0] last2_q;
  logic [3:0][ADDRESS_BITS-1:0] a_step_q;
  logic [2:0][ADDRESS_BITS-1:0] b_step_q;
  logic [3:0][ADDRESS_BITS-1:0] d_step_q;
  logic [COLUMN_BITS-1:0] cols_q;
  logic [COLUMN_BITS-1:0] cols_last_q;
  logic [11:0] block_rows_q;
  logic [7:0] window_rows_q;
  logic [7:0] window_cols_q;
  logic [ADDRESS_BITS-1:0] row_stride_q;  // between window rows, or rows of a resize's source
  logic [ADDRESS_BITS-1:0] col_stride_q;

  wire is_param = opcode_q == OP_VEC_PARAM;
  wire is_table = opcode_q == OP_VEC_TABLE;
  wire is_drain = opcode_q == OP_VEC_DRAIN;
  wire is_eltwise = opcode_q == OP_VEC_ELTWISE;
  wire is_resize = opcode_q == OP_VEC_RESIZE;
  wire is_softmax = HAS_ROWS && opcode_q == OP_VEC_SOFTMAX;
  wire is_norm = HAS_ROWS && opcode_q == OP_VEC_LAYER_NORM;

  // Loop state: what is left at each level, minus one.
  logic reading_q;
  logic [15:0] left0_q;
  logic [13:0] left1_q;
  logic [13:0] left2_q;
  logic [11:0] left3_q;
  logic [3:0][ADDRESS_BITS-1:0] a_q;
  logic [2:0][ADDRESS_BITS-1:0] b_q;
  logic [3:0][ADDRESS_BITS-1:0] d_q;
  logic [5:0] entry_q;
  logic [6:0] v_register_q;

  assign reading = reading_q;

  wire end0 = dense_q ? left0_q < 16'(LANES) : left0_q == '0;
  logic [1:0] level;  // the loop that goes on after this vector
  always_comb begin
    if (!end0) level = 2'd0;
    else if (left1_q != '0) level = 2'd1;
    else if (left2_q != '0) level = 2'd2;
    else level = 2'd3;
  end
  wire last_vector = level == 2'd3 && left3_q == '0;
  wire [COUNT_BITS-1:0] elements = dense_q ?
      (end0 ? COUNT_BITS'(left0_q) + 1'b1 : COUNT_BITS'(LANES)) : COUNT_BITS'(1);

  // Rows: a pass needs what those before it gave; the last one, what is made of that.
  logic [5:0] wait_q;
  assign chunk_first = left0_q == last0_q;
  assign pass_first = left1_q == last1_q;
  assign pass_last = left1_q == '0;
  wire stands = (is_softmax || is_norm) && reading_q && chunk_first && !pass_first;
  wire may_read = reading_q && window && !(stands && (!none_left || wait_q != '0));
  assign row_ready = stands && pass_last && retire && last_left;
  assign chunk = CHUNK_BITS'(elements);

  // Window of a pool, and the four neighbours of a resize: items of one vector.
  logic [7:0] window_row_q;
  logic [7:0] window_col_q;
  logic [ADDRESS_BITS-1:0] window_start_q;   // offset of the window's row
  logic [ADDRESS_BITS-1:0] window_offset_q;
  wire last_col = window_col_q == window_cols_q;
  wire last_item = last_col && window_row_q == window_rows_q;
  assign item_first = window_row_q == '0 && window_col_q == '0;

  // Tables of a resize: the entries of the current row and column.
  logic [ADDRESS_BITS-1:0] row_entry_q;  // address in the row table
  logic read_row_q;                      // port B reads the row's entry, then the column's
  logic entries_q;                       // both are there
  logic [1:0][ADDRESS_BITS-1:0] row_offset_q;
  logic [1:0][ADDRESS_BITS-1:0] col_offset_q;
  logic signed [1:0][15:0] row_weight_q;
  logic signed [1:0][15:0] col_weight_q;
  logic odd_column_q;

  wire row_side = window_row_q[0];
  wire col_side = window_col_q[0];
  wire weight_side = row_side ^ (f_resize_weight && odd_column_q);
  assign weight = 32'(signed'(row_weight_q[weight_side])) * 32'(signed'(col_weight_q[col_side]));

  // Port A.
  logic a_done_q;
  logic [COUNT_BITS-1:0] a_word_q;
  wire [ADDRESS_BITS-1:0] a_address = a_q[0] + (is_resize ?
      row_offset_q[row_side] + col_offset_q[col_side] : window_offset_q);
  logic [COUNT_BITS-1:0] a_bytes;
  always_comb begin
    if (is_param) a_bytes = bias_only_q ? COUNT_BITS'(4 * LANES) : COUNT_BITS'(9 * LANES);
    else if (is_table) a_bytes = COUNT_BITS'(256);
    else a_bytes = elements;
  end
  assign a_offset = a_address[WORD_BITS-1:0];
  wire [COUNT_BITS-1:0] a_last = (COUNT_BITS'(a_offset) + a_bytes - 1'b1) >> WORD_BITS;
  wire a_on = may_read && !is_drain && !a_done_q && (!is_resize || entries_q);
  assign a_take = a_on && a_granted;
  assign a_word = A_BITS'(a_word_q);
  wire a_item = a_take && a_word_q == a_last;
  wire a_all = a_item && last_item;

  // Port B.
  logic b_done_q;
  logic [COUNT_BITS-1:0] b_word_q;
  wire [ADDRESS_BITS-1:0] b_address = is_resize && read_row_q ? row_entry_q : b_q[0];
  logic [COUNT_BITS-1:0] b_bytes;
  always_comb begin
    if (is_resize) b_bytes = COUNT_BITS'(8);
    else if (is_norm) b_bytes = COUNT_BITS'(6 * LANES);
    else b_bytes = scalar_q ? COUNT_BITS'(1) : elements;
  end
  assign b_offset = b_address[WORD_BITS-1:0];
  wire [COUNT_BITS-1:0] b_last = (COUNT_BITS'(b_offset) + b_bytes - 1'b1) >> WORD_BITS;
  wire uses_b = is_eltwise || is_resize || (is_norm && pass_last);
  wire b_on = may_read && uses_b && !b_done_q;
  assign b_take = b_on && b_granted;
  assign b_word = B_BITS'(b_word_q);
  wire b_item = b_take && b_word_q == b_last;
  wire b_all = b_item && !(is_resize && read_row_q);

  always_comb begin
    a_request = '0;
    a_request.valid = a_on;
    if (a_on)
      a_request.address = a_address[ADDRESS_BITS-1:WORD_BITS] + WORD_ADDRESS_BITS'(a_word_q);
    b_request = '0;
    b_request.valid = b_on;
    if (b_on)
      b_request.address = b_address[ADDRESS_BITS-1:WORD_BITS] + WORD_ADDRESS_BITS'(b_word_q);
  end

  // Drain: a row of the M registers' half.
  logic half_q;
  logic [$clog2(HALF_ROWS)-1:0] row_q;
  logic [11:0] block_left_q;
  wire drain_full = half_full[half_q] || f_drain_early;
  wire drain_take = may_read && is_drain && drain_full;
  wire block_end = end0 && (block_left_q == '0 || left1_q == '0);
  assign half_awaited = may_read && is_drain && !drain_full;
  assign half_freed = drain_take && block_end ? (half_q ? 2'b10 : 2'b01) : 2'b00;
  assign m_half = half_q;
  assign m_row = row_q;

  assign complete = drain_take || (may_read && !is_drain && (a_done_q || a_all) &&
                                   (!uses_b || b_done_q || b_all));
  assign item_done = complete || (a_item && !last_item);
  assign entry = entry_q;
  assign v_register = v_register_q;
  assign has_result = !is_param && !is_table && (pass_last || !(is_softmax || is_norm));
  assign result_address = d_q[0];
  always_comb begin
    result_bytes = RESULT_BITS'(elements);
    if (is_drain) begin
      result_bytes = left2_q == '0 ? RESULT_BITS'(cols_last_q) : RESULT_BITS'(cols_q);
      result_bytes = result_bytes + 1'b1;
      if (raw_q) result_bytes = result_bytes << 2;
    end
  end

  // A table entry arrives in the cycle after its grants: put together with the words before it.
  logic entry_valid_q;
  logic entry_last_q;
  logic entry_row_q;
  logic [WORD_BITS-1:0] entry_offset_q;
  logic [COUNT_BITS-1:0] entry_word_q;
  logic [ENTRY_WORDS-2:0][WB-1:0] entry_words_q;
  logic [63:0] arrived;
  /* verilator lint_off LATCH */  // variables of a block are no latches
  always_comb begin
    arrived = '0;
    if (entry_valid_q && entry_last_q) begin
      automatic logic [ENTRY_WORDS*WB-1:0] words;
      words = '0;
      for (int unsigned i = 0; i < ENTRY_WORDS - 1; i++) words[i*WB+:WB] = entry_words_q[i];
      for (int unsigned i = 0; i < ENTRY_WORDS; i++)
        if (entry_word_q == COUNT_BITS'(i)) words[i*WB+:WB] = b_data;
      arrived = words[32'(entry_offset_q)*8+:64];
    end
  end
  /* verilator lint_on LATCH */
  wire [ADDRESS_BITS-1:0] entry_stride = entry_row_q ? row_stride_q : col_stride_q;
  wire [ADDRESS_BITS-1:0] offset0 = ADDRESS_BITS'(arrived[15:0]) * entry_stride;
  wire [ADDRESS_BITS-1:0] offset1 = ADDRESS_BITS'(arrived[31:16]) * entry_stride;

  always_ff @(posedge clk) begin
    if (entry_valid_q && !entry_last_q)
      for (int unsigned i = 0; i < ENTRY_WORDS - 1; i++)
        if (entry_word_q == COUNT_BITS'(i)) entry_words_q[i] <= b_data;
    if (entry_valid_q && entry_last_q) begin
      if (entry_row_q) begin
        row_offset_q <= {offset1, offset0};
        row_weight_q <= arrived[63:32];
      end else begin
        col_offset_q <= {offset1, offset0};
        col_weight_q <= arrived[63:32];
      end
    end
    entry_last_q <= b_item;
    if (b_take) begin
      entry_row_q <= read_row_q;
      entry_word_q <= b_word_q;
      entry_offset_q <= b_offset;
    end
  end

  wire [ADDRESS_BITS-1:0] a_next = a_q[level] + a_step_q[level];
  wire [ADDRESS_BITS-1:0] d_next = d_q[level] + d_step_q[level];
  wire [1:0] b_level = level == 2'd3 ? 2'd2 : level;  // no instruction has four levels of B
  wire [ADDRESS_BITS-1:0] b_next = b_q[b_level] + b_step_q[b_level];
  wire new_pixel = level != 2'd0;

  always_ff @(posedge clk) begin
    if (rst) begin
      reading_q <= 1'b0;
      entry_valid_q <= 1'b0;
    end else if (start) begin
      reading_q <= 1'b1;
      opcode_q <= head[7:0];
      bias_only_q <= of_param.bias_only;
      scalar_q <= of_eltwise.b_scalar;
      raw_q <= of_drain.raw;
      dense_q <= dense;
      last0_q <= last0;
      last1_q <= last1;
      last2_q <= last2;
      left0_q <= last0;
      left1_q <= last1;
      left2_q <= last2;
      left3_q <= last3;
      a_step_q <= a_step;
      b_step_q <= b_step;
      d_step_q <= d_step;
      a_q <= {4{a_start}};
      b_q <= {3{b_start}};
      d_q <= {4{d_start}};
      cols_q <= COLUMN_BITS'(of_drain.cols);
      cols_last_q <= COLUMN_BITS'(of_drain.cols_last);
      block_rows_q <= of_drain.block_rows;
      block_left_q <= of_drain.block_rows;
      half_q <= of_drain.m_half;
      row_q <= '0;
      window_row_q <= '0;
      window_col_q <= '0;
      window_start_q <= '0;
      window_offset_q <= '0;
      window_rows_q <= '0;
      window_cols_q <= '0;
      row_stride_q <= ADDRESS_BITS'(of_pool.ky_stride);
      col_stride_q <= ADDRESS_BITS'(of_pool.kx_stride);
      entry_q <= of_drain.param;
      v_register_q <= of_drain.v;
      case (head[7:0])
        OP_VEC_PARAM: begin
          entry_q <= of_param.param;
          v_register_q <= of_param.v;
        end
        OP_VEC_TABLE: v_register_q <= of_table.v;
        OP_VEC_ELTWISE: entry_q <= of_eltwise.param;
        OP_VEC_COPY: entry_q <= of_copy.param;
        OP_VEC_POOL: begin
          window_rows_q <= of_pool.k_h;
          window_cols_q <= of_pool.k_w;
        end
        OP_VEC_RESIZE: begin
          entry_q <= of_resize.param;
          window_rows_q <= 8'd1;
          window_cols_q <= 8'd1;
          row_stride_q <= ADDRESS_BITS'(of_resize.src_sy);
          col_stride_q <= ADDRESS_BITS'(of_resize.src_sx);
        end
        default: ;
      endcase
      a_done_q <= 1'b0;
      b_done_q <= 1'b0;
      a_word_q <= '0;
      b_word_q <= '0;
      row_entry_q <= ADDRESS_BITS'(of_resize.table_y);
      read_row_q <= 1'b1;
      entries_q <= 1'b0;
      odd_column_q <= 1'b0;
      entry_valid_q <= 1'b0;
      wait_q <= '0;
    end else begin
      entry_valid_q <= b_take && is_resize;
      if (a_take) a_word_q <= a_item ? '0 : a_word_q + 1'b1;
      if (b_take) b_word_q <= b_item ? '0 : b_word_q + 1'b1;
      if (a_all) a_done_q <= 1'b1;
      if (b_all) b_done_q <= 1'b1;
      if (b_item) read_row_q <= 1'b0;
      if (row_ready) wait_q <= is_norm ? 6'(LAYER_NORM_WAIT) : 6'(SOFTMAX_WAIT);
      else if (wait_q != '0) wait_q <= wait_q - 1'b1;
      if (entry_valid_q && entry_last_q && !entry_row_q) entries_q <= 1'b1;
      if (a_item) begin
        if (last_item) begin
          window_row_q <= '0;
          window_col_q <= '0;
          window_start_q <= '0;
          window_offset_q <= '0;
        end else if (last_col) begin
          window_row_q <= window_row_q + 1'b1;
          window_col_q <= '0;
          window_start_q <= window_start_q + row_stride_q;
          window_offset_q <= window_start_q + row_stride_q;
        end else begin
          window_col_q <= window_col_q + 1'b1;
          window_offset_q <= window_offset_q + col_stride_q;
        end
      end
      if (complete) begin
        a_done_q <= 1'b0;
        if (is_eltwise || is_norm || new_pixel) b_done_q <= 1'b0;
        reading_q <= !last_vector;
        for (int unsigned i = 0; i < 4; i++) begin
          if (i <= 32'(level)) begin
            a_q[i] <= a_next;
            d_q[i] <= d_next;
          end
        end
        for (int unsigned i = 0; i < 3; i++) if (i <= 32'(level)) b_q[i] <= b_next;
        left0_q <= end0 ? last0_q : left0_q - (dense_q ? 16'(LANES) : 16'd1);
        if (level == 2'd1) left1_q <= left1_q - 1'b1;
        if (level > 2'd1) left1_q <= last1_q;
        if (level == 2'd2) left2_q <= left2_q - 1'b1;
        if (level > 2'd2) left2_q <= last2_q;
        if (level == 2'd3) left3_q <= left3_q - 1'b1;
        if (is_param || (is_drain && level == 2'd2)) begin
          entry_q <= entry_q + 1'b1;
          v_register_q <= v_register_q + 1'b1;
        end
        // Drain: the next pixel of the block, or the other half.
        row_q <= block_end ? '0 : row_q + 1'b1;
        if (end0) block_left_q <= block_end ? block_rows_q : block_left_q - 1'b1;
        if (block_end) half_q <= !half_q;
        // Resize: the next column, or the next row.
        if (new_pixel) entries_q <= 1'b0;
        if (level == 2'd1) odd_column_q <= !odd_column_q;
        if (level == 2'd2) begin
          odd_column_q <= 1'b0;
          row_entry_q <= row_entry_q + ADDRESS_BITS'(8);
          read_row_q <= 1'b1;
        end
      end
    end
  end
endmodule
